"""Level 2: tries placements, cuts and orders together, keeps the best schedule within the limits (NumPy only)."""

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from harts_hf.planner.blocks import block_trials
from harts_hf.planner.config import PlannerConfig
from harts_hf.planner.leaf_table import LeafTable
from harts_hf.planner.orders import LimitError
from harts_hf.planner.placement import place_roots, place_runs, walks_of_owners
from harts_hf.planner.schedule import Schedule
from harts_hf.planner.trials import MANY_PIECES, Cuts, Task, build_schedule, build_whole, cuts_to_try
from harts_hf.planner.walk import Walk
from harts_hf.tree import IntArray, RolloutTree

# With sharing="always", plans of this much more rows than the fewest count as equal.
SAME_ROWS = 0.005
# Up to this many units times ranks, units are moved one by one and exchanged in pairs.
FEW_MOVES = 32
MAX_MOVES = 60


def best_schedule(tree: RolloutTree, config: PlannerConfig) -> Schedule:
    """The best schedule found for a forest as it stands.

    With ``sharing="always"`` trees stay whole on one rank each and the fewest forward rows win; otherwise the fastest
    schedule wins.

    Raises:
        LimitError: limits under which no schedule was found; the message names the smallest that would work.
    """
    task = Task.of(tree, config)
    whole = build_whole(task)
    if whole is not None:
        return whole
    walk = Walk.of_tree(tree).reordered(deepest="last")
    leaves = _leaf_table(task, walk) if config.world_size > 1 else None
    owners = [] if leaves is None else _placements(task, walk, leaves)
    trials = list(_trials(task, walk, owners))
    found: list[Schedule] = []
    failures: list[LimitError] = []
    rough = [(seconds, sum(walk.num_rows for walk in walks)) for seconds, walks, _ in trials]
    for _, walks, cuts in [trials[index] for index in _best_first(config, rough)]:
        try:
            found.append(build_schedule(task, walks, cuts))
        except LimitError as error:
            failures.append(error)
            continue
        if len(found[0].microbatches) > MANY_PIECES:
            break
    if leaves is not None and task.execution == "nested" and config.sharing != "always" and config.handoff:
        for walks, cuts in block_trials(task, walk, leaves):
            try:
                found.append(build_schedule(task, walks, cuts))
            except LimitError as error:
                failures.append(error)
    if not found:
        raise _no_schedule(config, failures)
    if owners and int(_units(task, walk)[-1] + 1) * config.world_size <= FEW_MOVES:
        found += [_improved(task, walk, owner, found) for owner in owners[:1]]
    return _choose(config, found)


def _choose(config: PlannerConfig, found: Sequence[Schedule]) -> Schedule:
    costs = [(schedule.estimated_seconds, schedule.forward_tokens) for schedule in found]
    return found[_best_first(config, costs)[0]]


def _best_first(config: PlannerConfig, costs: Sequence[tuple[float, int]]) -> list[int]:
    """Indices of ``(seconds, rows)`` in the order of preference."""
    preferred = list(range(len(costs)))
    if config.sharing == "always":
        fewest = min(rows for _, rows in costs)
        preferred = [i for i, (_, rows) in enumerate(costs) if rows <= fewest * (1 + SAME_ROWS)]
    return sorted(range(len(costs)), key=lambda i: (i not in preferred, *costs[i]))


Trial = tuple[float, list[Walk], Cuts]


def _placements(task: Task, walk: Walk, leaves: LeafTable) -> list[IntArray]:
    """Owners of the leaves on several ranks, the most promising first."""
    config = task.config
    if config.sharing == "always":
        return [place_roots(leaves, config.world_size)]
    slot_seconds = task.seconds_per.microbatches + task.seconds_per.calls
    found: list[IntArray] = []
    placed = place_runs(leaves, config.world_size, max_rows=task.max_rows, slot_seconds=slot_seconds)
    for owner in placed if walk.num_rows <= MANY_PIECES * task.max_rows else placed[:1]:
        if not any(np.array_equal(owner, other) for other in found):
            found.append(owner)
    return found


def _leaf_table(task: Task, walk: Walk) -> LeafTable:
    config = task.config
    return LeafTable.build(
        walk, chunk_size=config.chunk_size, step_parts=task.step_parts, world_size=config.world_size
    )


def _units(task: Task, walk: Walk) -> IntArray:
    """``[L]`` number of the unit that each leaf is placed with: itself, or with ``sharing="always"`` its tree."""
    roots = walk.root[walk.is_leaf]
    return roots if task.config.sharing == "always" else np.arange(len(roots))


def _trials(task: Task, walk: Walk, owners: Sequence[IntArray]) -> Iterator[Trial]:
    """Walks of the ranks and cuts, with rough estimates."""
    config = task.config
    orders = [walk]
    if (config.max_graph_tokens is not None and task.execution != "replay") or config.max_handoff_bytes is not None:
        orders.append(walk.reordered(deepest="first"))  # fewer open graphs, more boundary states
    for order in orders:
        for walks in [walks_of_owners(walk, order, owner, config.world_size) for owner in owners] or [[order]]:
            for seconds, cuts in cuts_to_try(task, walks):
                yield seconds, walks, cuts


def _improved(task: Task, walk: Walk, owner: IntArray, found: Sequence[Schedule]) -> Schedule:
    """Moves single units to other ranks, and exchanges pairs of them, as long as the estimate falls."""

    best = min(found, key=lambda schedule: schedule.estimated_seconds)
    units = _units(task, walk)
    bound = np.inf
    current = best
    tried: set[tuple[int, ...]] = set()
    queue = [owner[np.flatnonzero(np.append(True, np.diff(units) > 0))]]
    while queue and len(tried) < MAX_MOVES:
        changed = queue.pop(0)
        if tuple(changed.tolist()) in tried:
            continue
        tried.add(tuple(changed.tolist()))
        other = _fastest(task, walks_of_owners(walk, walk, changed[units], task.config.world_size), bound)
        if other is not None and (bound == np.inf or other.estimated_seconds < bound * (1 - 1e-9)):
            current, bound = other, other.estimated_seconds
            queue = list(_neighbours(changed, task.config.world_size))
    return min(best, current, key=lambda schedule: schedule.estimated_seconds)


def _fastest(task: Task, walks: list[Walk], bound: float) -> Schedule | None:
    """The fastest schedule of given walks; those roughly at or above ``bound`` are not built."""
    best = None
    for _, cuts in cuts_to_try(task, walks, bound):
        try:
            schedule = build_schedule(task, walks, cuts)
        except LimitError:
            continue
        if best is None or schedule.estimated_seconds < best.estimated_seconds:
            best = schedule
    return best


def _neighbours(owner: IntArray, world_size: int) -> Iterator[IntArray]:
    for unit in range(len(owner)):
        for rank in range(world_size):
            if rank != owner[unit]:
                changed = owner.copy()
                changed[unit] = rank
                yield changed
    for first, second in combinations(range(len(owner)), 2):
        if owner[first] != owner[second]:
            changed = owner.copy()
            changed[first], changed[second] = owner[second], owner[first]
            yield changed


def _no_schedule(config: PlannerConfig, failures: Sequence[LimitError]) -> LimitError:
    """Of the failures that ask for the fewest limits to be raised, the one that asks for least."""
    names = min((sorted(failure.needed) for failure in failures), key=lambda needed: (len(needed), needed))
    least = min([failure.needed[name] for name in names] for failure in failures if sorted(failure.needed) == names)
    return LimitError(dict(zip(names, least, strict=True)), config)
