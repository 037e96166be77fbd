"""What `harts plan` finds: the gain over all groups, a row per group, what the planned steps do. Needs no torch."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from harts_hf.planner import (
    LimitError,
    PlannerConfig,
    Schedule,
    build_chunk_tree,
    count_world,
    min_linear_calls,
    no_sharing_bound,
    plan_step,
)
from harts_hf.planner.memory import MemoryCounts
from harts_hf.planner.walk import FloatArray
from harts_hf.rollouts.files import RolloutGroup
from harts_hf.rollouts.recorded import tree_of_groups
from harts_hf.tree import RolloutTree


@dataclass(frozen=True, kw_only=True)
class RowBytes:
    """Bytes of activations in bfloat16 with activation checkpointing (TRL's default), as modeling/memory.py has them.

    Attributes:
        kept: of a network row, from its forward to its backward: the inputs of all layers.
        running: of a network row besides, while its backward runs: those of one layer, computed again.
        running_prefix: of a row that is read from earlier microbatches, while the backward that reads it runs.
        source: of which model.
    """

    kept: float
    running: float
    running_prefix: float
    source: str

    def activations(self, counts: MemoryCounts) -> FloatArray:
        """``[ops]`` float64: bytes while each op runs."""
        running = self.running * counts.backward_rows + self.running_prefix * counts.backward_prefix_rows
        return np.asarray(self.kept * counts.graph_rows + running, np.float64)


# Of the model that the default cost model is of; a test computes them from its configuration.
DEFAULT_ROW_BYTES = RowBytes(kept=73_728, running=197_267, running_prefix=30_720, source="Ling-3.0-tiny")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Peak bytes on the rank with most, but for weights, gradients and the optimizer.

    Attributes:
        activations: of the microbatches that wait for their backward.
        kept: states of microbatches that later ones continue.
    """

    activations: float
    kept: float = 0.0

    @property
    def total(self) -> float:
        """Both together."""
        return self.activations + self.kept


@dataclass(frozen=True, kw_only=True)
class Gain:
    """All groups once through a training step, each trajectory by itself and on trees.

    Attributes:
        tokens: rows that a pass over everything computes: (before, after).
        seconds: estimated: (at least, of any way to train trajectory by trajectory; of the plan).
        memory: (of microbatches of the same budget, or of the longest trajectory where that is longer; of the plan).
    """

    tokens: tuple[int, int]
    seconds: tuple[float, float]
    memory: tuple[Memory, Memory]

    def to_dict(self) -> dict[str, Any]:
        """What JSON can hold."""
        memory = [{"activations": one.activations, "kept": one.kept} for one in self.memory]
        return {
            name: {"before": before, "after": after}
            for name, (before, after) in (("tokens", self.tokens), ("seconds", self.seconds), ("memory_bytes", memory))
        }


@dataclass(frozen=True, eq=False, kw_only=True)
class PlanReport:
    """Everything that `harts plan` tells.

    Attributes:
        groups: a row per group.
        total: the row of all: of the trees of the steps, in which groups share what they begin with.
        schedules: of the steps that train all groups once, in the order of the file.
        drawn: index of the longest step.
        gain: over all of them.
        row_bytes: that the gain's memory was estimated with.
        scores: whether the steps need log-probs before their losses.
        raised: limits that no schedule of some step could meet, in words; these steps are planned with larger ones.
    """

    groups: list[dict[str, Any]]
    total: dict[str, Any]
    schedules: list[Schedule]
    drawn: int
    gain: Gain
    row_bytes: RowBytes
    scores: bool
    raised: tuple[str, ...] = ()

    @property
    def schedule(self) -> Schedule:
        """That of the longest step."""
        return self.schedules[self.drawn]

    def plan(self) -> dict[str, Any]:
        """What the steps do: sums over them, peaks of the highest, the rest of the longest."""
        schedules, longest = self.schedules, self.schedule

        def all_of(name: str) -> int:
            return sum(getattr(schedule, name) for schedule in schedules)

        def peak(name: str) -> int:
            return max(getattr(schedule, name) for schedule in schedules)

        before, after = self.gain.seconds
        return {
            "world_size": longest.config.world_size,
            "max_tokens_per_microbatch": longest.config.max_tokens_per_microbatch,
            "steps": len(schedules),
            "execution": longest.execution,
            "scores": self.scores and any(schedule.scoring_tokens for schedule in schedules),
            "limits_raised": list(self.raised),
            "microbatches": sum(len(schedule.microbatches) for schedule in schedules),
            **{name: all_of(name) for name in ("forward_tokens", "backward_tokens", "replay_tokens")},
            **{name: peak(name) for name in ("peak_graph_tokens", "peak_handoff_tokens", "peak_handoff_bytes")},
            "estimated_seconds": after,
            "estimated_seconds_without_sharing": before,
            "estimated_gain": before / after,
            "cost_model": longest.cost.source,
            "memory_model": self.row_bytes.source,
            "decision": longest.decision,
        }

    def world(self) -> dict[str, Any]:
        """What all ranks do together in the longest step."""
        counts = count_world(self.schedule)
        return {"balance": counts.balance, "step_seconds": self.schedule.estimated_seconds, **vars(counts)}

    def to_dict(self) -> dict[str, Any]:
        """What ``--json`` writes; the schedule is that of the longest step."""
        return {
            "gain": self.gain.to_dict(),
            "groups": self.groups,
            "total": self.total,
            "plan": self.plan(),
            "world": self.world(),
            "schedule": json.loads(self.schedule.to_json()),
        }


def plan_report(
    groups: Sequence[RolloutGroup],
    config: PlannerConfig,
    *,
    groups_per_step: int | None = None,
    row_bytes: RowBytes = DEFAULT_ROW_BYTES,
    scores: bool = False,
) -> PlanReport:
    """Plans the steps that train all groups once, as a tree trainer plans them.

    Args:
        groups: of a file.
        config: of the planner. Limits that no schedule can meet are raised, as in training.
        groups_per_step: how many of them a step trains, in their order; None for all in one step.
        row_bytes: for the memory.
        scores: whether log-probs are needed before a step's losses (``tree/scoring_needed_by``).

    Raises:
        ValueError: ``groups_per_step`` below 1.
    """
    if groups_per_step is not None and groups_per_step < 1:
        raise ValueError(f"expected --groups-per-step of at least 1, got {groups_per_step}")
    size, raised = groups_per_step or len(groups), []
    trees = [tree_of_groups(groups[first : first + size]) for first in range(0, len(groups), size)]

    def on_raised(error: LimitError) -> None:
        raised.append(f"{error}; planned with that, as training does")

    schedules, before = [], 0.0
    for tree in trees:
        schedule = plan_step(tree, config, can_skip_scoring=not scores, on_raised=on_raised)
        schedules.append(schedule)
        before += _seconds_without_sharing(tree, schedule, config, scores)
    rows = [_group_row(group.name, group.tree, config.chunk_size) for group in groups]
    total = _total_row(trees, config.chunk_size)
    # Of a step, not of the file: a microbatch holds no more than one rank's part of it.
    largest = max(schedule.tree.num_expanded_tokens for schedule in schedules)
    alone = max(total["depth"], min(config.max_tokens_per_microbatch, -(-largest // config.world_size)))
    after = [_peak(schedule, rank, row_bytes) for schedule in schedules for rank in range(config.world_size)]
    seconds = [schedule.estimated_seconds for schedule in schedules]
    gain = Gain(
        tokens=(total["expanded"], sum(schedule.forward_tokens for schedule in schedules)),
        seconds=(before, sum(seconds)),
        memory=(
            Memory(activations=alone * (row_bytes.kept + row_bytes.running)),
            max(after, key=lambda memory: memory.total),
        ),
    )
    return PlanReport(
        groups=rows,
        total=total,
        schedules=schedules,
        drawn=seconds.index(max(seconds)),
        gain=gain,
        row_bytes=row_bytes,
        scores=scores,
        raised=tuple(dict.fromkeys(raised)),
    )


def _seconds_without_sharing(tree: RolloutTree, schedule: Schedule, config: PlannerConfig, scores: bool) -> float:
    # A bound, not a plan: the gain is not flattered by how well trajectories happen to pack. Microbatches are those
    # of the settings; nested trees have smaller ones.
    alone = no_sharing_bound(tree, config, schedule.execution)
    if alone > schedule.estimated_seconds:
        return alone
    # The bound says nothing: many ranks, few trajectories, little to share.
    return plan_step(tree, replace(config, sharing="never"), can_skip_scoring=not scores).estimated_seconds


def _peak(schedule: Schedule, rank: int, row_bytes: RowBytes) -> Memory:
    counts = schedule.memory_counts(rank)
    activations, kept = row_bytes.activations(counts), counts.handed_bytes
    if not len(activations):  # an idle rank
        return Memory(activations=0.0)
    peak = int((activations + kept).argmax())
    return Memory(activations=float(activations[peak]), kept=float(kept[peak]))


def _total_row(trees: Sequence[RolloutTree], chunk_size: int) -> dict[str, Any]:
    rows = [_group_row("all", tree, chunk_size) for tree in trees]
    total: dict[str, Any] = {
        "group": "all",
        **{key: sum(row[key] for row in rows) for key in ("trajectories", "expanded", "unique", "replay")},
        **{key: max(row[key] for row in rows) for key in ("depth", "calls", "calls (ends)")},
    }
    return {**total, "ratio": total["expanded"] / total["unique"]}


def _group_row(name: str, tree: RolloutTree, chunk_size: int) -> dict[str, Any]:
    return {
        "group": name,
        "trajectories": tree.num_trajectories,
        "expanded": tree.num_expanded_tokens,
        "unique": tree.num_tokens,
        "ratio": tree.sharing_ratio,
        "depth": int(tree.depth.max()) + 1,
        "replay": build_chunk_tree(tree.parent, tree.depth, chunk_size).replay_rows,
        "calls": min_linear_calls(tree, chunk_size),
        "calls (ends)": min_linear_calls(tree, chunk_size, taps="ends"),
    }
