"""What the ranks of a job train on: the rows of some groups, each rank its part of them."""

from dataclasses import replace
from pathlib import Path

from benchmarks.ranks.jobs import DIVISOR, WORKLOADS
from benchmarks.update.workloads import groups_of
from harts_hf.bench.rollouts import StepRollouts

DRY_GROUPS = 2


def rollouts_of(workload: str, shapes: Path, vocab_size: int, *, dry: bool) -> StepRollouts:
    """The rows of a step, as ``harts bench`` has them, filled up to what all numbers of processes divide."""
    work = WORKLOADS[workload]
    groups = groups_of(shapes, work.shapes, dry=dry)
    chosen = groups if work.groups is None else [groups[number] for number in work.groups]
    return StepRollouts.of(groups[:DRY_GROUPS] if dry else chosen, vocab_size=vocab_size).filled(DIVISOR)


def part_of(rollouts: StepRollouts, rank: int, world: int) -> StepRollouts:
    """One rank's rows: every ``world``-th, so that groups straddle ranks and baselines have equal work everywhere."""
    mine = slice(rank, None, world)
    names = ("token_ids", "prompt_lengths", "masks", "rewards")
    part = {name: getattr(rollouts, name)[mine] for name in names}
    return replace(rollouts, **part, old_logprobs=None)
