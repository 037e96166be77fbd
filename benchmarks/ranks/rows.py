"""What the ranks of a job train on: the rows of some groups, each rank its part of them."""

from dataclasses import replace
from pathlib import Path

from benchmarks.ranks.jobs import DIVISOR, WORKLOADS
from benchmarks.update.workloads import groups_of
from harts_hf.bench.rollouts import StepRollouts
from harts_hf.trainers.slicing import MOST_ON_CPU

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


def rows_at_once(rollouts: StepRollouts, world: int) -> int:
    """Rows of a batch of every rank, whose microbatches do not depend on it: as many of a rank's as have their losses
    computed on the CPU, and as divide them. A batch of one row costs as many operations as one of all."""
    count = len(rollouts.token_ids) // world
    most = max(1, MOST_ON_CPU // max(map(len, rollouts.masks)))
    return max(rows for rows in range(1, min(most, count) + 1) if count % rows == 0)
