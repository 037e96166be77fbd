"""What is alive while each op of a rank runs: counts that memory follows (NumPy only)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from harts_hf.planner.accounting import Export, Measure
from harts_hf.planner.execution import DUMMY, Op
from harts_hf.planner.microbatch import Microbatch
from harts_hf.tree import IntArray

Life = tuple[int, int, int]


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
    ops: Sequence[Op], microbatches: Sequence[Microbatch], measures: Sequence[Measure], exports: Mapping[int, Export]
) -> MemoryCounts:
    """Counts of one rank's ops (without dummies). Complexity: one Python step an op."""
    size = len(ops)
    starts = {index: place for place, (kind, index) in enumerate(ops) if kind == "F"}
    graphs = [(index, starts[index], place) for place, (kind, index) in enumerate(ops) if kind == "B"]
    values, gradients = value_lives(ops, microbatches), gradient_lives(ops, microbatches)

    def alive(lives: Iterable[Life], size_of: Mapping[int, int]) -> IntArray:
        return amounts_alive(size, ((first, last, size_of[i]) for i, first, last in lives))

    def running(kind: str, amounts: Sequence[int]) -> IntArray:
        return np.array([amounts[index] if which == kind else 0 for which, index in ops], np.int64)

    rows = [microbatch.num_rows for microbatch in microbatches]
    prefix = [microbatch.num_prefix for microbatch in microbatches]
    chunks = [measured.chunks for measured in measures]
    handed_rows = {trunk: export.rows for trunk, export in exports.items()}
    states = {trunk: export.states for trunk, export in exports.items()}
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
        handed_bytes=handed_bytes(ops, microbatches, exports),
    )


def value_lives(ops: Sequence[Op], microbatches: Sequence[Microbatch]) -> list[Life]:
    """When handed values are alive: ``(trunk id, first op, last op)``, both included.

    A forward of a trunk makes them; they live until the last op that reads them before the trunk's next forward. A
    backward reads too, since activation checkpointing runs its layers again.
    """
    made: dict[int, int] = {}
    read: dict[int, int] = {}
    lives: list[Life] = []
    for time, (kind, index) in enumerate(ops):
        if index == DUMMY:
            continue
        for trunk in microbatches[index].trunks:
            assert trunk in made, "states that no forward made"
            read[trunk] = time
        if kind != "B":
            if index in read:
                lives.append((index, made[index], read.pop(index)))
            made[index] = time
    return lives + [(trunk, made[trunk], last) for trunk, last in read.items()]


def gradient_lives(ops: Sequence[Op], microbatches: Sequence[Microbatch]) -> list[Life]:
    """When gradient sums of handed states are alive: from the first dependent's backward to the trunk's own."""
    first: dict[int, int] = {}
    lives: list[Life] = []
    for time, (kind, index) in enumerate(ops):
        if kind != "B" or index == DUMMY:
            continue
        if index in first:
            lives.append((index, first.pop(index), time))
        for trunk in microbatches[index].trunks:
            first.setdefault(trunk, time)
    return lives


def handed_bytes(ops: Sequence[Op], microbatches: Sequence[Microbatch], exports: Mapping[int, Export]) -> IntArray:
    """Bytes of handed values and gradient sums that are alive while each op runs, ``[ops]``."""
    parts = [(first, last, exports[trunk].value_bytes) for trunk, first, last in value_lives(ops, microbatches)]
    parts += [(first, last, exports[trunk].gradient_bytes) for trunk, first, last in gradient_lives(ops, microbatches)]
    return amounts_alive(len(ops), parts)


def amounts_alive(size: int, parts: Iterable[tuple[int, int, int]]) -> IntArray:
    """``[size]``: at each op the sum of amounts that live from a first to a last op, both included."""
    change = np.zeros(size + 1, np.int64)
    for first, last, amount in parts:
        change[first] += amount
        change[last + 1] -= amount
    return np.cumsum(change)[:-1]
