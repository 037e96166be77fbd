"""Orders of a rank's ops that stay within the limits of memory (NumPy only)."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from harts_hf.planner.accounting import Handed
from harts_hf.planner.config import Execution, PlannerConfig
from harts_hf.planner.execution import Op, keep_ops, nested_ops, replay_ops
from harts_hf.planner.lives import value_lives
from harts_hf.planner.memory import graph_tokens, handed_bytes
from harts_hf.planner.microbatch import Microbatch


class LimitError(ValueError):
    """No schedule was found that keeps within limits.

    Attributes:
        needed: names of the limits in :class:`PlannerConfig` that are too small, and values that would do.
    """

    def __init__(self, needed: Mapping[str, int], config: PlannerConfig) -> None:
        given = " and ".join(f"{name}={getattr(config, name)}" for name in needed)
        super().__init__(
            f"no schedule keeps within {given}; the smallest that works with these settings is {_listed(needed)}"
        )
        self.needed = dict(needed)

    @property
    def wish(self) -> str:
        """What would have to be, for a sentence."""
        return _listed(self.needed)


def _listed(needed: Mapping[str, int]) -> str:
    return " and ".join(f"{name}={value}" for name, value in needed.items())


def join_needs(needs: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Limits that meet all of several needs."""
    joined: dict[str, int] = {}
    for needed in needs:
        for name, value in needed.items():
            joined[name] = max(value, joined.get(name, 0))
    return joined


def order_ops(
    own: Sequence[Microbatch],
    all_microbatches: Sequence[Microbatch],
    handed: Mapping[int, Handed],
    *,
    execution: Execution,
    config: PlannerConfig,
) -> list[Op]:
    """Ops of one rank within the limits, with as few extra forwards as the greedy choices below find.

    Args:
        own: the rank's microbatches, trunks before dependents.
        all_microbatches: by id.
        handed: what each trunk hands over; read under a limit of handed bytes only.
        execution: "replay", "nested" or "keep".
        config: has the limits.

    Raises:
        LimitError: limits that no order of these microbatches was found to meet.
    """
    if not own:
        return []
    if execution == "nested":
        ops = _nested_within(own, all_microbatches, config.max_graph_tokens)
    elif execution == "keep":
        ops = keep_ops(own)
    else:
        ops = _replay_within(own, all_microbatches, handed, config.max_handoff_bytes)
    peaks = {"max_graph_tokens": max(graph_tokens(ops, all_microbatches))}
    if config.max_handoff_bytes is not None:
        peaks["max_handoff_bytes"] = int(handed_bytes(ops, all_microbatches, handed).max())
    limits = {name: getattr(config, name) for name in peaks}
    needed = {name: peak for name, peak in peaks.items() if limits[name] is not None and peak > limits[name]}
    if needed:
        raise LimitError(needed, config)
    return ops


def _nested_within(own: Sequence[Microbatch], all_microbatches: Sequence[Microbatch], limit: int | None) -> list[Op]:
    """Drops graphs of open trunks, the outermost first, where too many are alive: those lie above most others."""
    dropped: set[int] = set()
    while True:
        ops = nested_ops(own, frozenset(dropped))
        if limit is None:
            return ops
        more = _graphs_to_drop(ops, all_microbatches, limit)
        if not more:
            return ops
        dropped |= more


def _graphs_to_drop(ops: Sequence[Op], all_microbatches: Sequence[Microbatch], limit: int) -> set[int]:
    """Open trunks whose graphs have to go so that at most ``limit`` rows are alive, if they are enough."""
    found: set[int] = set()
    alive: list[int] = []  # as a stack; what is found of it lies below the rest
    num_found, total = 0, 0  # of the stack; rows of the rest
    for kind, index in ops:
        rows = all_microbatches[index].num_rows
        if kind == "F":
            alive.append(index)
            total += rows
            while total > limit and num_found < len(alive) - 1:
                found.add(alive[num_found])
                total -= all_microbatches[alive[num_found]].num_rows
                num_found += 1
        elif kind == "B":
            alive.pop()
            if num_found > len(alive):
                num_found -= 1
            else:
                total -= rows
    return found


def _replay_within(
    own: Sequence[Microbatch], all_microbatches: Sequence[Microbatch], handed: Mapping[int, Handed], limit: int | None
) -> list[Op]:
    """Drops handed states after the scoring pass, most bytes per row first, and makes them again where needed.

    Complexity: a pass of NumPy over the ops for each trunk that is dropped.
    """
    if limit is None:
        return replay_ops(own)
    last_reader = {trunk: microbatch.id for microbatch in own for trunk in microbatch.trunks}
    # States that the last microbatch reads are needed at once when the scoring pass ends.
    droppable = [trunk for trunk, reader in last_reader.items() if reader != own[-1].id]
    droppable.sort(key=lambda trunk: (-handed[trunk].value_bytes / all_microbatches[trunk].num_rows, trunk))
    # In one string with every second forward that there may be: whether a trunk is dropped moves no other life.
    ops = replay_ops(own, frozenset(droppable))
    trunks = [microbatch.trunk_ids for microbatch in all_microbatches]
    lives: dict[int, list[tuple[int, int]]] = {}
    for trunk, begin, end in value_lives(ops, trunks):
        lives.setdefault(trunk, []).append((begin, end))
    first, last = (np.array([lives[trunk][side][side] for trunk in droppable], np.int64) for side in (0, -1))
    gaps = [slice(lives[trunk][0][1] + 1, lives[trunk][1][0]) for trunk in droppable]
    alive = handed_bytes(ops, all_microbatches, handed)
    runs = np.ones(len(ops), bool)
    for trunk, gap in zip(droppable, gaps, strict=True):
        alive[gap] += handed[trunk].value_bytes
        runs[gap.stop] = False
    kept = np.ones(len(droppable), bool)
    while True:
        time = int(np.where(runs, alive, -1).argmax())
        candidates = np.flatnonzero(kept & (first <= time) & (time <= last))
        if alive[time] <= limit or len(candidates) == 0:
            return replay_ops(own, frozenset(trunk for trunk, keep in zip(droppable, kept, strict=True) if not keep))
        chosen = int(candidates[0])
        kept[chosen] = False
        alive[gaps[chosen]] -= handed[droppable[chosen]].value_bytes
        runs[gaps[chosen].stop] = True
