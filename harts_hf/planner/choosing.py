"""What a training step plans with: executions to choose from, limits that give way (NumPy only).

Trainers and `harts plan` share this, so that what is estimated for a file is what a step on it does.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from harts_hf.planner.config import PlannerConfig
from harts_hf.planner.cost import DEFAULT_COST
from harts_hf.planner.orders import LimitError
from harts_hf.planner.plan import plan_window
from harts_hf.planner.schedule import Schedule
from harts_hf.tree import RolloutTree

Planned = TypeVar("Planned")


def executions_to_try(config: PlannerConfig, *, can_skip_scoring: bool, num_ranks: int) -> list[bool]:
    """For each execution that may be the fastest, whether it leaves the scoring pass out; the likely one first.

    On several ranks a nested one may need so many dummies that replay is faster.
    """
    both = num_ranks > 1 and can_skip_scoring and config.execution == "auto"
    return [True, False] if both else [can_skip_scoring]


def least_seconds(tree: RolloutTree, config: PlannerConfig) -> float:
    """A lower bound on the estimated seconds of any schedule of ``tree``: each row once, evenly over the ranks.

    Args:
        tree: of the step.
        config: of plans, with an execution other than "auto". Limits are not looked at, so they may be raised.
    """
    step = (config.cost or DEFAULT_COST).step(forwards=2 if config.execution == "replay" else 1)
    return step.seconds_of_rows(tree.num_tokens, float((tree.depth + 1).sum())) / config.world_size


def fastest(
    tree: RolloutTree,
    configs: Sequence[PlannerConfig],
    plan: Callable[[int], Planned],
    of: Callable[[Planned], Schedule],
) -> tuple[int, Planned]:
    """The plan of the fewest estimated seconds; those that cannot be faster than one before them are not made.

    Args:
        tree: that all are made for.
        configs: of the plans, the likely one first.
        plan: makes the plan of a number in ``configs``.
        of: the schedule of what ``plan`` gives.

    Returns:
        Its number in ``configs``, and the plan. Of equally fast ones the last.
    """
    best: tuple[int, Planned] | None = None
    for number, config in enumerate(configs):
        if best is None or of(best[1]).estimated_seconds >= least_seconds(tree, config):
            found = plan(number)
            if best is None or of(found).estimated_seconds <= of(best[1]).estimated_seconds:
                best = number, found
    assert best is not None, "expected a configuration"
    return best


def with_execution_chosen(config: PlannerConfig, *, can_skip_scoring: bool, num_rows: int) -> PlannerConfig:
    """A configuration with another execution than "auto".

    "auto" is "nested" where the scoring pass can be left out, with at most ``max_graph_tokens`` rows of graphs
    alive (twice a microbatch if there is no such limit), and "replay" elsewhere. Nested windows that do not fit
    into one microbatch have microbatches of at most half of those rows: the graph of a trunk is then kept while
    its dependents run, and need not be computed again.

    Args:
        config: of plans.
        can_skip_scoring: whether the scoring pass can be left out.
        num_rows: of the window (on several ranks, of an equal part of it).
    """
    if config.execution != "auto":
        return config
    if not can_skip_scoring:
        return replace(config, execution="replay")
    rows, graph = config.max_tokens_per_microbatch, config.max_graph_tokens
    graph = 2 * rows if graph is None else graph
    if num_rows > min(rows, graph):
        rows = min(rows, max(config.chunk_size, graph // 2))
    return replace(config, execution="nested", max_tokens_per_microbatch=rows, max_graph_tokens=graph)


def plan_step(
    tree: RolloutTree,
    config: PlannerConfig,
    *,
    can_skip_scoring: bool,
    on_raised: Callable[[LimitError], None] = lambda error: None,
) -> Schedule:
    """The plan of a training step: of the executions that it may take, the one that is estimated to be fastest.

    Of several ranks it is the plan that they share ("global" placement).

    Args:
        tree: of all trajectories of the step.
        config: with as many ranks as the training has.
        can_skip_scoring: whether the loss's derivatives can be known before any log-prob is. Where no rank has more
            than one microbatch nothing is scored apart: its forward is the one that its backward uses.
        on_raised: told about limits that no schedule of these trajectories can meet, and that are raised.
    """
    ranks = config.world_size
    tries = executions_to_try(config, can_skip_scoring=can_skip_scoring, num_ranks=ranks)
    rows = -(-tree.num_tokens // ranks)
    configs = [with_execution_chosen(config, can_skip_scoring=skips, num_rows=rows) for skips in tries]
    _, schedule = fastest(
        tree, configs, lambda number: _plan_raised(tree, configs[number], on_raised), lambda one: one
    )
    if not can_skip_scoring and config.execution == "auto" and _is_whole(schedule):
        whole = _plan_raised(tree, replace(configs[0], execution="nested"), on_raised)
        if _is_whole(whole):
            return whole
    return schedule


def _is_whole(schedule: Schedule) -> bool:
    ranks = [microbatch.rank for microbatch in schedule.microbatches]
    return len(set(ranks)) == len(ranks)


def _plan_raised(tree: RolloutTree, config: PlannerConfig, on_raised: Callable[[LimitError], None]) -> Schedule:
    try:
        return plan_window(tree, config)
    except LimitError as error:
        on_raised(error)
        raised: Any = error.needed
        return plan_window(tree, replace(config, **raised))
