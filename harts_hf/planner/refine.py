"""Level 2: tries placements, cuts and orders together, keeps the best schedule within the limits (NumPy only)."""

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from harts_hf.planner.config import PlannerConfig
from harts_hf.planner.orders import LimitError
from harts_hf.planner.placement import LeafTable, place_runs, walks_of_owners
from harts_hf.planner.schedule import Schedule
from harts_hf.planner.traversal import Traversal
from harts_hf.planner.trials import Cuts, Task, build_schedule, cuts_to_try
from harts_hf.tree import IntArray, RolloutTree

# Placements may be this much slower than the fastest found, for fewer rows computed twice.
SLACKS = (0.0, 0.04, 0.1)
# Above this many microbatches the trials are ranked by rough estimates and only the best is built.
MANY_PIECES = 48
# Up to this many leaves times ranks, leaves are moved one by one and exchanged in pairs.
FEW_MOVES = 64


def best_schedule(tree: RolloutTree, config: PlannerConfig) -> Schedule:
    """The best schedule found for a forest as it stands.

    With ``sharing="always"`` the fewest forward rows win among schedules at most ``SLACKS[-1]`` slower than the
    fastest; otherwise the fastest wins.

    Raises:
        ValueError: limits under which no schedule was found; the message names the smallest that would work.
    """
    task = Task.of(tree, config)
    walk = Traversal.of_tree(tree).reordered(deepest="last")
    owners = _placements(task, walk)
    trials = list(_trials(task, walk, owners))
    found: list[Schedule] = []
    failures: list[LimitError] = []
    for _, walks, cuts in _ranked(config, trials):
        try:
            found.append(build_schedule(task, walks, cuts))
        except LimitError as error:
            failures.append(error)
            continue
        if len(found[0].microbatches) > MANY_PIECES:
            break
    if not found:
        raise _no_schedule(config, failures)
    if owners and len(owners[0]) * config.world_size <= FEW_MOVES:
        found += [_improved(task, walk, owner, found) for owner in owners[:1]]
    return _choose(config, found)


def _choose(config: PlannerConfig, found: Sequence[Schedule]) -> Schedule:
    fastest = min(schedule.estimated_seconds for schedule in found)
    if config.sharing == "always":
        near = [s for s in found if s.estimated_seconds <= fastest * (1 + SLACKS[-1]) + 1e-12]
        return min(near, key=lambda schedule: (schedule.forward_tokens, schedule.estimated_seconds))
    return min(found, key=lambda schedule: (schedule.estimated_seconds, schedule.forward_tokens))


Trial = tuple[float, list[Traversal], Cuts]


def _placements(task: Task, walk: Traversal) -> list[IntArray]:
    """Owners of the leaves, several to try; none on one rank."""
    if task.config.world_size == 1:
        return []
    leaves = LeafTable.build(walk, chunk_size=task.config.chunk_size, step=task.step)
    found: list[IntArray] = []
    for owner in place_runs(leaves, task.config.world_size, SLACKS):
        if not any(np.array_equal(owner, other) for other in found):
            found.append(owner)
    return found


def _trials(task: Task, walk: Traversal, owners: Sequence[IntArray]) -> Iterator[Trial]:
    """Walks of the ranks and cuts, with rough estimates."""
    config = task.config
    orders = [walk]
    if (config.max_graph_tokens is not None and task.execution != "replay") or config.max_handoff_bytes is not None:
        orders.append(walk.reordered(deepest="first"))  # fewer open graphs, more boundary states
    for order in orders:
        for walks in [walks_of_owners(walk, order, owner, config.world_size) for owner in owners] or [[order]]:
            for seconds, cuts in cuts_to_try(task, walks):
                yield seconds, walks, cuts


def _ranked(config: PlannerConfig, trials: list[Trial]) -> list[Trial]:
    """Trials in the order in which they are likely to be chosen."""
    fastest = min(seconds for seconds, _, _ in trials)

    def key(trial: Trial) -> tuple[bool, int, float]:
        seconds, walks, _ = trial
        near = config.sharing == "always" and seconds <= fastest * (1 + SLACKS[-1])
        return not near, sum(walk.num_rows for walk in walks) if near else 0, seconds

    return sorted(trials, key=key)


def _improved(task: Task, walk: Traversal, owner: IntArray, found: Sequence[Schedule]) -> Schedule:
    """Moves single leaves to other ranks, and exchanges pairs of leaves, as long as the estimate falls."""

    def schedule_of(owner: IntArray) -> Schedule | None:
        walks = walks_of_owners(walk, walk, owner, task.config.world_size)
        built = []
        for _, cuts in cuts_to_try(task, walks):
            try:
                built.append(build_schedule(task, walks, cuts))
            except LimitError:
                continue
        return min(built, key=lambda s: s.estimated_seconds, default=None)

    best = min(found, key=lambda schedule: schedule.estimated_seconds)
    current = schedule_of(owner) or best
    improved = True
    while improved:
        improved = False
        for changed in _neighbours(owner, task.config.world_size):
            other = schedule_of(changed)
            if other is not None and other.estimated_seconds < current.estimated_seconds * (1 - 1e-9):
                owner, current, improved = changed, other, True
                break
    return min(best, current, key=lambda schedule: schedule.estimated_seconds)


def _neighbours(owner: IntArray, world_size: int) -> Iterator[IntArray]:
    for leaf in range(len(owner)):
        for rank in range(world_size):
            if rank != owner[leaf]:
                changed = owner.copy()
                changed[leaf] = rank
                yield changed
    for first, second in combinations(range(len(owner)), 2):
        if owner[first] != owner[second]:
            changed = owner.copy()
            changed[first], changed[second] = owner[second], owner[first]
            yield changed


def _no_schedule(config: PlannerConfig, failures: Sequence[LimitError]) -> ValueError:
    setting = failures[0].setting
    smallest = min(failure.smallest for failure in failures if failure.setting == setting)
    return ValueError(
        f"no schedule keeps within {setting}={getattr(config, setting)}; the smallest that works with these settings "
        f"is {setting}={smallest}"
    )
