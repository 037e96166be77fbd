"""Which trajectories an update's window holds: all ranks' (global placement), or this rank's own (local)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from harts_hf.planner import executions_to_try, fastest, least_seconds
from harts_hf.runtime.exchange import check_same_plan
from harts_hf.runtime.planning import WindowPlanner
from harts_hf.runtime.ranks import Ranks
from harts_hf.runtime.window import TreeWindow
from harts_hf.tree import IntArray, RolloutTree

Placement = Literal["global", "local"]
PlacementChoice = Literal["auto", "global", "local"]
PLACEMENTS: tuple[PlacementChoice, ...] = get_args(PlacementChoice)

Merge = Callable[[Sequence[IntArray]], RolloutTree]

# What the exchange of global placement is taken to cost: collectives of a few numbers, and bytes of rows.
EXCHANGE_SECONDS = 2e-3
EXCHANGE_SECONDS_PER_ROW = 50 / 5e9


@dataclass(frozen=True, eq=False, kw_only=True)
class Placed:
    """The window of an update.

    Attributes:
        window: planned, on the CPU.
        planner: what planned it; limits that could not be kept were raised in the window's schedule alone.
        first: number in the window of this rank's first trajectory.
        placement: whose trajectories it holds.
    """

    window: TreeWindow
    planner: WindowPlanner
    first: int
    placement: Placement


def place(
    planner: WindowPlanner,
    own: Sequence[IntArray],
    stand_in: Callable[[], IntArray],
    ranks: Ranks,
    *,
    choice: PlacementChoice,
    can_skip_scoring: bool,
    names: Sequence[str],
    merge: Merge,
) -> Placed:
    """Plans the window of an update; the ranks end with one plan for all of them, or with one each.

    "auto" takes what the cost model estimates to be faster, the same on all ranks; with ``sharing="always"``, global.

    Args:
        planner: of one rank.
        own: this rank's trajectories.
        stand_in: gives what is run if no rank has any (or, in local placement, this one has none).
        ranks: the processes.
        choice: of the placement.
        can_skip_scoring: whether the nested execution may run without a scoring pass.
        names: of the values that are asked for.
        merge: makes a tree of trajectories.

    Raises:
        ValueError: trajectories that cannot be planned.
        OtherRankError: those of another rank.
    """
    if ranks.count == 1:
        tree = merge(own or [stand_in()])
        (chosen,) = _planners(planner, [can_skip_scoring], tree.num_tokens)
        return Placed(window=chosen(tree), planner=chosen, first=0, placement="local")
    may_skip = executions_to_try(planner.config, can_skip_scoring=can_skip_scoring, num_ranks=ranks.count)
    if choice == "local":
        return _placed_locally(planner, may_skip, own or [stand_in()], ranks, merge)[0]
    everyone = ranks.gather_arrays(own)
    first = sum(map(len, everyone[: ranks.index]))
    together = [tokens for part in everyone for tokens in part] or ranks.gather_arrays([stand_in()])[0]
    with ranks.together():
        tree = merge(together)
        planners = _planners(planner, may_skip, -(-tree.num_tokens // ranks.count))
        shared = [_for_ranks(one, ranks.count) for one in planners]
        number, window = fastest(
            tree, [one.config for one in shared], lambda i: shared[i](tree, rank=ranks.index), lambda one: one.schedule
        )
        used = shared[number]
    check_same_plan(window.schedule, names, ranks)  # before estimates, which decide what ranks do next, are compared
    seconds = window.schedule.estimated_seconds + exchange_seconds(tree.num_tokens)
    if choice == "auto" and planner.config.sharing != "always":
        alone = own or [stand_in()]
        tree_alone = merge(alone)
        least = min(least_seconds(tree_alone, one.config) for one in planners)
        if seconds > _agreed(ranks, least):  # else no local plan can be faster
            local, local_seconds = _placed_locally(planner, may_skip, alone, ranks, merge)
            if _agreed(ranks, local_seconds) < _agreed(ranks, seconds):
                return local
    return Placed(window=window, planner=used, first=first, placement="global")


def exchange_seconds(num_rows: int) -> float:
    """What exchanging token ids, values and coefficients of so many rows is taken to cost."""
    return EXCHANGE_SECONDS + EXCHANGE_SECONDS_PER_ROW * num_rows


def _planners(planner: WindowPlanner, may_skip: Sequence[bool], num_rows: int) -> list[WindowPlanner]:
    return [planner.with_execution_chosen(can_skip_scoring=can, num_rows=num_rows) for can in may_skip]


def _for_ranks(planner: WindowPlanner, count: int) -> WindowPlanner:
    return replace(planner, config=replace(planner.config, world_size=count))


def _placed_locally(
    planner: WindowPlanner, may_skip: Sequence[bool], own: Sequence[IntArray], ranks: Ranks, merge: Merge
) -> tuple[Placed, float]:
    """The window of this rank's own trajectories, in the execution that is fastest for the slowest rank."""
    with ranks.together():
        tree = merge(own)
        planners = _planners(planner, may_skip, tree.num_tokens)
        windows = [one(tree) for one in planners]
    seconds = [_agreed(ranks, window.schedule.estimated_seconds) for window in windows]
    best = int(np.argmin(seconds))
    return Placed(window=windows[best], planner=planners[best], first=0, placement="local"), seconds[best]


def _agreed(ranks: Ranks, seconds: float) -> float:
    """The largest of any rank, to a nanosecond: the same number everywhere."""
    return ranks.agree(round(seconds * 1e9))[0] / 1e9
