"""Level 2: tries placements, cuts and orders together, keeps the fastest schedule within the limits (NumPy only)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from harts_hf.planner.accounting import ChunkEnds, Exports, measure
from harts_hf.planner.assemble import assemble
from harts_hf.planner.config import PlannerConfig
from harts_hf.planner.cost import Coefficients, CostModel
from harts_hf.planner.cuts import Piece, PieceLimits, cut_evenly, cut_greedily, cut_whole_paths
from harts_hf.planner.orders import LimitError, order_ops
from harts_hf.planner.placement import LeafTable, place_runs, walks_of_runs
from harts_hf.planner.schedule import Schedule
from harts_hf.planner.traversal import CutTable, Traversal
from harts_hf.tree import RolloutTree

# Placements may be this much slower than the fastest found, for fewer rows computed twice.
SLACKS = (0.0, 0.04, 0.1)
EXTRA_PIECES = 3


@dataclass(frozen=True, eq=False, kw_only=True)
class Task:
    """What is planned, and tables that every trial needs."""

    tree: RolloutTree
    config: PlannerConfig
    cost: CostModel
    execution: str
    step: Coefficients
    ends: ChunkEnds

    @classmethod
    def of(cls, tree: RolloutTree, config: PlannerConfig) -> "Task":
        """Of a forest and a configuration."""
        cost = config.cost or CostModel()
        execution = "replay" if config.execution == "auto" else config.execution
        return cls(
            tree=tree,
            config=config,
            cost=cost,
            execution=execution,
            step=cost.step(forwards=2 if execution == "replay" else 1),
            ends=ChunkEnds(tree, config.chunk_size),
        )

    @property
    def max_rows(self) -> int:
        """Network rows of a microbatch: its graph has to fit too."""
        return min(self.config.max_tokens_per_microbatch, self.config.max_graph_tokens or 2**62)


def best_schedule(tree: RolloutTree, config: PlannerConfig) -> Schedule:
    """The best schedule found for a forest as it stands.

    With ``sharing="always"`` fewest forward rows win among schedules at most ``SLACKS[-1]`` slower than the fastest;
    otherwise the fastest wins.

    Raises:
        ValueError: limits under which no schedule was found; the message names the smallest that would work.
    """
    task = Task.of(tree, config)
    found: list[Schedule] = []
    failures: list[LimitError] = []
    for walks in _placements(task):
        for cuts in _cuts(task, walks):
            try:
                found.append(build_schedule(task, walks, cuts))
            except LimitError as error:
                failures.append(error)
    if not found:
        raise _no_schedule(config, failures)
    fastest = min(schedule.estimated_seconds for schedule in found)
    if config.sharing == "always":
        near = [s for s in found if s.estimated_seconds <= fastest * (1 + SLACKS[-1]) + 1e-12]
        return min(near, key=lambda schedule: (schedule.forward_tokens, schedule.estimated_seconds))
    return min(found, key=lambda schedule: (schedule.estimated_seconds, schedule.forward_tokens))


def _placements(task: Task) -> Iterator[list[Traversal]]:
    """Walks of the ranks, several to try."""
    walk = Traversal.of_tree(task.tree).reordered(deepest="last")
    if task.config.world_size == 1:
        yield [walk]
        tight = task.execution != "replay" and task.config.max_graph_tokens is not None
        if tight or task.config.max_handoff_bytes is not None:
            yield [walk.reordered(deepest="first")]
        return
    leaves = LeafTable.build(walk, chunk_size=task.config.chunk_size, step=task.step)
    seen = []
    for slack in SLACKS:
        runs = place_runs(leaves, task.config.world_size, slack=slack)
        if runs not in seen:
            seen.append(runs)
            yield walks_of_runs(walk, runs)


def _cuts(task: Task, walks: Sequence[Traversal]) -> Iterator[list[list[Piece]]]:
    """Pieces of every rank, several to try."""
    config = task.config
    if not config.handoff:
        yield [cut_whole_paths(walk, task.max_rows) for walk in walks]
        return
    tables = [CutTable.build(walk, chunk_size=config.chunk_size, step=task.step) for walk in walks]
    for recompute_below in _recompute_choices(task, tables):
        limits = PieceLimits(rows=task.max_rows, linear_rows=config.max_linear_rows, recompute_below=recompute_below)
        greedy = [cut_greedily(t, limits, chunk_size=config.chunk_size, step=task.step) for t in tables]
        if len(walks) == 1:
            yield greedy
            continue
        fewest = max(map(len, greedy))
        best, best_seconds = None, np.inf
        for count in range(fewest, fewest + EXTRA_PIECES):
            cuts = cut_evenly(tables, limits, count, chunk_size=config.chunk_size, step=task.step)
            if cuts is None:
                continue
            seconds = _lockstep_seconds(tables, cuts) + count * (task.step.microbatches + task.step.calls)
            if seconds < best_seconds:
                best, best_seconds = cuts, seconds
        if best is not None:
            yield best


def _recompute_choices(task: Task, tables: Sequence[CutTable]) -> list[int]:
    """Lengths below which a prefix is computed again on its rank: never, or where that is faster than reading it."""
    if task.config.sharing == "always":
        return [0]
    row_seconds = task.step.rows + task.step.linear_rows
    state_seconds = task.step.handoff_bytes * task.cost.handoff_bytes_per_state
    below = int(state_seconds / row_seconds) if row_seconds > 0 else 0
    shallow = min((int(t.above[1:-1].min()) for t in tables if len(t.above) > 2), default=0)
    return [0, below] if below > max(shallow, 0) else [0]


def _lockstep_seconds(tables: Sequence[CutTable], cuts: Sequence[Sequence[Piece]]) -> float:
    """Time of the rows of pieces that run side by side, the slowest of each."""
    slots = np.zeros((len(tables), max(len(pieces) for pieces in cuts)))
    for rank, (table, pieces) in enumerate(zip(tables, cuts, strict=True)):
        if pieces:
            bounds = np.searchsorted(table.place, [piece.start for piece in pieces] + [pieces[-1].stop])
            slots[rank, : len(pieces)] = np.diff(table.seconds[bounds])
    return float(slots.max(axis=0).sum())


def build_schedule(task: Task, walks: Sequence[Traversal], cuts: Sequence[Sequence[Piece]]) -> Schedule:
    """The schedule of given pieces, with an order within the limits.

    Raises:
        LimitError: no such order.
    """
    config = task.config
    microbatches = assemble(walks, cuts)
    measures = [measure(task.ends, microbatch, task.cost) for microbatch in microbatches]
    exports = Exports(microbatches, measures, task.cost)
    by_rank: list[list] = [[] for _ in walks]
    for microbatch in microbatches:
        by_rank[microbatch.rank].append(microbatch)
    rank_ops = tuple(
        tuple(
            order_ops(
                own,
                microbatches,
                exports.of,
                execution=task.execution,
                max_graph_tokens=config.max_graph_tokens,
                max_handoff_bytes=config.max_handoff_bytes,
            )
        )
        for own in by_rank
    )
    schedule = Schedule(
        tree=task.tree,
        microbatches=tuple(microbatches),
        config=config,
        execution=task.execution,
        rank_ops=rank_ops,
    )
    # They are what the schedule would compute itself on first use.
    schedule.__dict__["measures"] = measures
    schedule.__dict__["exports"] = exports
    return schedule


def _no_schedule(config: PlannerConfig, failures: Sequence[LimitError]) -> ValueError:
    setting = failures[0].setting
    smallest = min(failure.smallest for failure in failures if failure.setting == setting)
    return ValueError(
        f"no schedule keeps within {setting}={getattr(config, setting)}; the smallest that works with these settings "
        f"is {setting}={smallest}"
    )
