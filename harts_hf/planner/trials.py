"""One trial of the planner: walks and cuts in, a schedule within the limits out (NumPy only)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from harts_hf.planner.accounting import Accounts, ChunkEnds
from harts_hf.planner.assembly import assemble
from harts_hf.planner.config import Execution, PlannerConfig
from harts_hf.planner.cost import DEFAULT_COST, CostModel, UnitSeconds
from harts_hf.planner.cuts import Piece, PieceLimits, cut_evenly, cut_greedily, cut_whole_paths
from harts_hf.planner.execution import Op, block_ops, interleave
from harts_hf.planner.memory import graph_tokens, handed_bytes
from harts_hf.planner.microbatch import Microbatch
from harts_hf.planner.orders import LimitError, join_needs, order_ops
from harts_hf.planner.schedule import Schedule
from harts_hf.planner.walk import CutTable, Walk
from harts_hf.tree import RolloutTree

# Numbers of pieces per rank that are tried, from the fewest; half as many in a large window.
EXTRA_PIECES = 4
FEW_PIECES = 16
# Above this many microbatches the trials are ranked by rough estimates and only the best is built.
MANY_PIECES = 48
# Graphs that a rank has open at once in the nested words that are tried on several ranks.
BLOCKS = (1, 2)
Cuts = list[list[Piece]]


@dataclass(frozen=True, eq=False, kw_only=True)
class Task:
    """What is planned, and tables that every trial needs."""

    tree: RolloutTree
    config: PlannerConfig
    cost: CostModel
    execution: Execution
    seconds_per: UnitSeconds
    step_parts: tuple[UnitSeconds, UnitSeconds]
    ends: ChunkEnds

    @classmethod
    def of(cls, tree: RolloutTree, config: PlannerConfig) -> "Task":
        """Of a forest and a configuration."""
        cost = config.cost or DEFAULT_COST
        execution: Execution = "replay" if config.execution == "auto" else config.execution
        return cls(
            tree=tree,
            config=config,
            cost=cost,
            execution=execution,
            seconds_per=cost.step(forwards=2 if execution == "replay" else 1),
            step_parts=cost.step_parts(forwards=2 if execution == "replay" else 1),
            ends=ChunkEnds(tree, config.chunk_size),
        )

    @property
    def max_rows(self) -> int:
        """Network rows of a microbatch: its graph has to fit too."""
        return min(self.config.max_tokens_per_microbatch, self.config.max_graph_tokens or 2**62)


def cuts_to_try(task: Task, walks: Sequence[Walk], bound: float = np.inf) -> Iterator[tuple[float, Cuts]]:
    """Pieces of every rank, several to try, each with a rough estimate of the step's seconds below ``bound``.

    The rough estimate leaves out handed bytes and further sequential calls, so it errs on the low side.
    """
    config, seconds_per = task.config, task.seconds_per
    tables = [CutTable.build(walk, chunk_size=config.chunk_size, seconds_per=seconds_per) for walk in walks]

    def cut(limits: PieceLimits) -> Cuts:
        return [cut_greedily(table, limits, chunk_size=config.chunk_size, seconds_per=seconds_per) for table in tables]

    if not config.handoff:
        limits = PieceLimits(rows=task.max_rows, linear_rows=config.max_linear_rows)
        cuts = [
            cut_whole_paths(walk, table, limits, chunk_size=config.chunk_size)
            for walk, table in zip(walks, tables, strict=True)
        ]
        seconds = _rough_seconds(task, tables, cuts)
        if seconds < bound:
            yield seconds, cuts
        return
    for recompute_below in _recompute_choices(task, tables):
        limits = PieceLimits(rows=task.max_rows, linear_rows=config.max_linear_rows, recompute_below=recompute_below)
        greedy = cut(limits)
        choices = [(limits, greedy)]
        if max(map(len, greedy)) <= FEW_PIECES:  # where a piece saved is worth an unfinished chunk
            ragged = replace(limits, aligned=False)
            fewer = cut(ragged)
            if max(map(len, fewer)) < max(map(len, greedy)):
                choices.append((ragged, fewer))
        limits_graphs = task.execution == "nested" and config.max_graph_tokens is not None
        if limits_graphs or config.max_handoff_bytes is not None:
            closing = replace(limits, closing=True)
            apart = cut(closing)
            if apart != greedy:
                choices.append((closing, apart))
            if limits_graphs and max(map(len, apart)) > MANY_PIECES:  # rough estimates do not see graphs dropped
                choices = [(closing, apart)]
        for choice, pieces in choices:
            trial = _evened(task, tables, choice, pieces, bound)
            if trial is not None:
                yield trial


def _evened(
    task: Task, tables: Sequence[CutTable], limits: PieceLimits, greedy: Cuts, bound: float
) -> tuple[float, Cuts] | None:
    """On one rank the fewest pieces; on several, even ones: the number of the best rough estimate."""
    if len(tables) == 1:
        return _rough_seconds(task, tables, greedy), greedy
    fewest = max(map(len, greedy))
    longest = max(float(table.seconds[-1]) for table in tables)
    found = []
    extra = EXTRA_PIECES // 2 if fewest * len(tables) > MANY_PIECES else EXTRA_PIECES
    for count in range(fewest, fewest + extra):
        if longest + count * (task.seconds_per.microbatches + task.seconds_per.calls) >= bound:
            break
        even = cut_evenly(tables, limits, count, chunk_size=task.config.chunk_size, seconds_per=task.seconds_per)
        if even is not None:
            found.append((_rough_seconds(task, tables, even), count, even))
    seconds, _, best = min(found, key=lambda trial: trial[:2], default=(np.inf, 0, greedy))
    return (seconds, best) if seconds < bound else None


def _recompute_choices(task: Task, tables: Sequence[CutTable]) -> list[int]:
    """Lengths below which a prefix is computed again on its rank: never, or where that is faster than reading it."""
    if task.config.sharing == "always":
        return [0]
    row_seconds = task.seconds_per.rows + task.seconds_per.linear_rows
    state_seconds = task.seconds_per.handoff_bytes * task.cost.handoff_bytes_per_state
    below = int(state_seconds / row_seconds) if row_seconds > 0 else 0
    inner = [table.above[1:-1] for table in tables if len(table.above) > 2]
    shallow = min((int(above[above > 0].min(initial=2**62)) for above in inner), default=2**62)
    return [0, below] if below > shallow else [0]


def _rough_seconds(task: Task, tables: Sequence[CutTable], cuts: Cuts) -> float:
    """Time of the rows of pieces that run side by side, the slowest of each, and of the microbatches themselves."""
    slots = np.zeros((len(tables), max(len(pieces) for pieces in cuts)))
    for rank, (table, pieces) in enumerate(zip(tables, cuts, strict=True)):
        if pieces:
            bounds = np.searchsorted(table.position, [piece.start for piece in pieces] + [pieces[-1].stop])
            slots[rank, : len(pieces)] = np.diff(table.seconds[np.minimum(bounds, len(table.position) - 1)])
    return float(slots.max(axis=0).sum()) + slots.shape[1] * (task.seconds_per.microbatches + task.seconds_per.calls)


def build_schedule(task: Task, walks: Sequence[Walk], cuts: Cuts) -> Schedule:
    """The schedule of given pieces, with an order within the limits.

    Raises:
        LimitError: no such order.
    """
    microbatches = assemble(walks, cuts)
    return _ordered(task, microbatches, Accounts.of(task.ends, microbatches, task.cost), len(walks))


def build_whole(task: Task) -> Schedule | None:
    """The schedule of one microbatch on one rank; None where the limits do not allow it.

    There is nothing to choose then: every walk is cut nowhere.
    """
    config, num_rows = task.config, task.tree.num_tokens
    if config.world_size > 1 or num_rows > task.max_rows:
        return None
    spans = np.array([[0, num_rows]])
    microbatches = [Microbatch.from_spans(id=0, row_spans=spans, owned_spans=spans)]
    accounts = Accounts.of(task.ends, microbatches, task.cost)
    if config.max_linear_rows is not None and accounts.measures[0].work.linear_rows > config.max_linear_rows:
        return None
    return _ordered(task, microbatches, accounts, 1)


def _ordered(task: Task, microbatches: list[Microbatch], accounts: Accounts, num_ranks: int) -> Schedule:
    config = task.config
    by_rank: list[list[Microbatch]] = [[] for _ in range(num_ranks)]
    for microbatch in microbatches:
        by_rank[microbatch.rank].append(microbatch)
    handed = {} if config.max_handoff_bytes is None else accounts.handed
    rank_ops, failures = [], []
    for own in by_rank:
        try:
            ops = order_ops(own, microbatches, handed, execution=task.execution, config=config)
            rank_ops.append(tuple(ops))
        except LimitError as error:
            failures.append(error)
    if failures:  # what works has to work on every rank
        raise LimitError(join_needs(failure.needed for failure in failures), config)

    def schedule(ops: Sequence[Sequence[Op]]) -> Schedule:
        return Schedule(
            tree=task.tree,
            microbatches=tuple(microbatches),
            config=config,
            execution=task.execution,
            rank_ops=tuple(map(tuple, ops)),
            accounts=accounts,
        )

    if task.execution != "nested" or num_ranks == 1:
        return schedule(rank_ops)
    words: list[Sequence[Sequence[Op]]] = [rank_ops]
    limit = config.max_graph_tokens or max(max(graph_tokens(ops, microbatches), default=0) for ops in rank_ops)
    forward = [task.cost.forward.seconds(measured.work) for measured in accounts.measures]
    words += [[block_ops(own, most, limit, forward) for own in by_rank] for most in BLOCKS]
    found = [schedule(ops) for ops in _interleaved(config, words, microbatches, accounts, limit)]
    return min(found, key=lambda one: one.estimated_seconds)


def _interleaved(
    config: PlannerConfig, words: Sequence[Sequence[Sequence[Op]]], microbatches: Sequence[Microbatch],
    accounts: Accounts, limit: int,
) -> Iterator[Sequence[Sequence[Op]]]:  # fmt: skip
    """Nested words of all ranks, several to try, each also so that they fit one another better; the first as it is if
    none keeps the limit of handed bytes."""
    rows = [microbatch.num_rows for microbatch in microbatches]
    within = config.max_handoff_bytes
    for number, ops in enumerate(words):
        for fitted in (interleave(ops, rows, limit), ops):
            peaks = [handed_bytes(own, microbatches, accounts.handed) for own in fitted] if within is not None else []
            if (number == 0 and fitted is ops) or all(peak.max(initial=0) <= (within or 0) for peak in peaks):
                yield fitted
                break
