"""The plan of an optimizer step: of one process by itself, or of all processes together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from harts_hf.cli.dry_run.rollouts import PlannedRollouts
from harts_hf.planner import Schedule, plan_window
from harts_hf.tree import RolloutTree

# A forest of more tokens than this takes minutes to plan here.
MOST_TOKENS = 2_000_000


@dataclass(frozen=True, eq=False, kw_only=True)
class StepPlan:
    """What is run.

    Attributes:
        schedule: of one process with the most work, or of all of them.
        said: whose work it is, for people.
    """

    schedule: Schedule
    said: str


def plan_step(
    planner: Any, rollouts: PlannedRollouts, *, num_processes: int, placement: str, skips: Sequence[bool]
) -> StepPlan:
    """The fastest plan, by estimate, of those that the trainer would choose from.

    Args:
        planner: the trainer's ``WindowPlanner``.
        rollouts: of a step.
        num_processes: that share it.
        placement: ``tree_placement``: "local", each process its own rollouts; "global", one forest of all; "auto".
        skips: whether the scoring pass may be left out; each is tried.
    """
    plans = []
    if placement != "global" or num_processes == 1:
        plans += _plans(planner, skips, rollouts.trees, 1, "on the process with the most work")
    if placement != "local" and num_processes > 1:
        trees = rollouts.of_processes(num_processes)
        if sum(tree.num_tokens for tree in trees) <= MOST_TOKENS:
            said = f"on {num_processes} processes, as one forest"
            plans += _plans(planner, skips, trees, num_processes, said)
        elif not plans:
            said = "on one process (all of them are too many to plan here)"
            plans += _plans(planner, skips, rollouts.trees, 1, said)
    return min(plans, key=lambda plan: plan.schedule.estimated_seconds)


def _plans(
    planner: Any, skips: Sequence[bool], trees: Sequence[RolloutTree], world_size: int, said: str
) -> list[StepPlan]:
    rows = -(-sum(tree.num_tokens for tree in trees) // world_size)
    chosen = [planner.with_execution_chosen(can_skip_scoring=skip, num_rows=rows).config for skip in skips]
    return [
        StepPlan(schedule=plan_window(trees, replace(config, world_size=world_size)), said=said) for config in chosen
    ]
