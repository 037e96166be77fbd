"""What is alive while each op of a rank runs: counts that memory follows (NumPy only)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from harts_hf.planner.accounting import Handed, Measure
from harts_hf.planner.execution import DUMMY, Op
from harts_hf.planner.lives import Life, amounts_alive, gradient_lives, value_lives
from harts_hf.planner.microbatch import Microbatch
from harts_hf.tree import IntArray


@dataclass(frozen=True, eq=False, kw_only=True)
class MemoryCounts:
    """What is alive while each op of a rank runs, ``[ops]`` each, in the order of ``Schedule.ops(dummies=False)``.

    Peak memory is the largest sum over these counts, each times bytes of its own, and not a sum of their peaks: graphs
    and handed states are largest at different times.

    Attributes:
        graph_rows: network rows whose graphs are alive.
        graph_chunks: chunk nodes of the linear layers in those graphs; kernels fill the last one up.
        graph_prefix_rows: rows that those graphs read from trunks: copies of keys and values, or of latents and what
            they expand to. Under activation checkpointing only the running layer has them.
        value_rows: handed rows whose values are alive.
        value_states: handed boundary states whose values are alive.
        gradient_rows: handed rows whose gradient sums are alive.
        gradient_states: handed boundary states whose gradient sums are alive.
        scoring_rows: network rows of the running forward, if it makes no graph.
        backward_rows: network rows of the running backward.
        backward_prefix_rows: rows that the running backward reads from trunks, where their gradients are made.
        handed_bytes: of the handed values and gradient sums that are alive, by the cost model's sizes.
    """

    graph_rows: IntArray
    graph_chunks: IntArray
    graph_prefix_rows: IntArray
    value_rows: IntArray
    value_states: IntArray
    gradient_rows: IntArray
    gradient_states: IntArray
    scoring_rows: IntArray
    backward_rows: IntArray
    backward_prefix_rows: IntArray
    handed_bytes: IntArray

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The counts, in the order of the columns of :meth:`table`."""
        return tuple(field.name for field in fields(cls))

    def table(self) -> IntArray:
        """``[ops, 11]``."""
        return np.stack([getattr(self, name) for name in self.names()], axis=1)

    def peak_bytes(self, bytes_per_unit: Mapping[str, float]) -> float:
        """The largest sum of counts times bytes over all ops; counts that are not named weigh nothing.

        ``handed_bytes`` are bytes already (its weight is near 1) and stand for the four counts of values and
        gradients.

        Raises:
            ValueError: a name that is no count.
        """
        unknown = sorted(set(bytes_per_unit) - set(self.names()))
        if unknown:
            raise ValueError(f"expected counts among {', '.join(self.names())}, got {', '.join(unknown)}")
        weights = np.array([bytes_per_unit.get(name, 0.0) for name in self.names()])
        return float((self.table() @ weights).max(initial=0.0))


def count_memory(
    ops: Sequence[Op], microbatches: Sequence[Microbatch], measures: Sequence[Measure], handed: Mapping[int, Handed]
) -> MemoryCounts:
    """Counts of one rank's ops (without dummies). Complexity: one Python step per op."""
    size = len(ops)
    starts = {index: time for time, (kind, index) in enumerate(ops) if kind == "F"}
    graphs = [(index, starts[index], time) for time, (kind, index) in enumerate(ops) if kind == "B"]
    trunks = [microbatch.trunk_ids for microbatch in microbatches]
    values, gradients = value_lives(ops, trunks), gradient_lives(ops, trunks)

    def alive(lives: Iterable[Life], size_of: Mapping[int, int]) -> IntArray:
        return amounts_alive(size, ((first, last, size_of[i]) for i, first, last in lives))

    def running(kind: str, amounts: Sequence[int]) -> IntArray:
        return np.array([amounts[index] if which == kind else 0 for which, index in ops], np.int64)

    rows = [microbatch.num_rows for microbatch in microbatches]
    prefix = [microbatch.num_prefix for microbatch in microbatches]
    chunks = [measured.chunks for measured in measures]
    handed_rows = {trunk: amounts.rows for trunk, amounts in handed.items()}
    states = {trunk: amounts.states for trunk, amounts in handed.items()}
    return MemoryCounts(
        graph_rows=alive(graphs, dict(enumerate(rows))),
        graph_chunks=alive(graphs, dict(enumerate(chunks))),
        graph_prefix_rows=alive(graphs, dict(enumerate(prefix))),
        value_rows=alive(values, handed_rows),
        value_states=alive(values, states),
        gradient_rows=alive(gradients, handed_rows),
        gradient_states=alive(gradients, states),
        scoring_rows=running("S", rows),
        backward_rows=running("B", rows),
        backward_prefix_rows=running("B", prefix),
        handed_bytes=_bytes_alive(size, values, gradients, handed),
    )


def handed_bytes(ops: Sequence[Op], microbatches: Sequence[Microbatch], handed: Mapping[int, Handed]) -> IntArray:
    """Bytes of handed values and gradient sums that are alive while each op runs, ``[ops]``."""
    trunks = [microbatch.trunk_ids for microbatch in microbatches]
    return _bytes_alive(len(ops), value_lives(ops, trunks), gradient_lives(ops, trunks), handed)


def _bytes_alive(
    size: int, values: Sequence[Life], gradients: Sequence[Life], handed: Mapping[int, Handed]
) -> IntArray:
    parts = [(first, last, handed[trunk].value_bytes) for trunk, first, last in values]
    parts += [(first, last, handed[trunk].gradient_bytes) for trunk, first, last in gradients]
    return amounts_alive(size, parts)


def graph_tokens(ops: Sequence[Op], microbatches: Sequence[Microbatch]) -> list[int]:
    """Network rows whose graphs are alive while each op runs (a dummy's one row is not counted)."""
    alive, series = 0, []
    for kind, index in ops:
        rows = microbatches[index].num_rows if index != DUMMY else 0
        alive += rows if kind == "F" else 0
        series.append(alive)
        alive -= rows if kind == "B" else 0
    return series
