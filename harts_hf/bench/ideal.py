"""What sharing could gain: each stage of the baseline divided by how much less of its own work the tree has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harts_hf.planner import Schedule


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a side's schedule computes in one pass.

    Attributes:
        rows: network rows.
        chunks: chunk nodes of its linear layers.
        pairs: query-key pairs of its attention, or the area of the tiles that its kernel visits for them.
        labels: rows of the head.
        microbatches: forwards and backwards.
    """

    rows: float
    chunks: float
    pairs: float
    labels: float
    microbatches: int

    @classmethod
    def of(cls, schedule: Schedule, labels: int, pairs: float | None = None) -> "Work":
        """Of a schedule; ``pairs`` in place of the schedule's own."""
        works = [measure.work for measure in schedule.measures]
        return cls(
            rows=sum(work.rows for work in works),
            chunks=sum(measure.chunks for measure in schedule.measures),
            pairs=sum(work.pairs for work in works) if pairs is None else pairs,
            labels=labels,
            microbatches=len(works),
        )


@dataclass(frozen=True, kw_only=True)
class Ideal:
    """The least time of a step that shares.

    Attributes:
        seconds: by part; ``total`` their sum.
        ratios: how often less work the tree has, by stage.
    """

    seconds: dict[str, float]
    ratios: dict[str, float]

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return sum(self.seconds.values())


def ideal_step(
    phases: Mapping[str, float],
    stages: Mapping[str, float],
    constant: float,
    baseline: Work,
    tree: Work,
) -> Ideal:
    """The baseline's step if every stage cost the tree what it costs the baseline per unit of its own work.

    Attention divides by pairs, the rule by chunk nodes, the head by labels; all else in forwards and backwards, and
    the trainer's work on rows, by network rows. Undivided are the optimizer and clipping, and the constant of
    each of the tree's own microbatches (launches; adding up gradients of weights).

    Args:
        phases: of the baseline's step, as :class:`harts_hf.bench.clock.StepClock` has them.
        stages: seconds of its attention, rule and head.
        constant: seconds of each microbatch that do not depend on its rows.
        baseline: what it computed.
        tree: what the tree computes.
    """
    ratios = {
        "attention": baseline.pairs / tree.pairs,
        "rule": baseline.chunks / tree.chunks,
        "head": baseline.labels / max(tree.labels, 1),
        "rows": baseline.rows / tree.rows,
    }
    inside = phases["forward_backward"]
    taken = sum(stages.values())
    scale = min(1.0, inside / taken) if taken else 1.0  # marks cost a little themselves
    constants = min(constant * baseline.microbatches, max(0.0, inside - taken * scale))
    seconds = {stage: stages[stage] * scale / ratios[stage] for stage in stages}
    seconds["rows"] = max(0.0, inside - taken * scale - constants) / ratios["rows"]
    seconds["microbatches"] = constants / baseline.microbatches * tree.microbatches
    seconds["optimizer"] = phases["optimizer"] + phases["clipping"]
    outside = ("prepare", "old_log_probs", "planning", "other")
    seconds["trainer"] = sum(phases[name] for name in outside) / ratios["rows"]
    return Ideal(seconds=seconds, ratios=ratios)


def all_divided(seconds: Mapping[str, float], ratio: float, microbatches: int, tree_microbatches: int) -> float:
    """The ideal's seconds if no microbatch had a constant.

    The constant is a rough one: a microbatch that fills a GPU hides launches that a smaller one waits for. The ideal
    with it asks for too little, this one for too much of a step whose rows do not fill the GPU.

    Args:
        seconds: of an :class:`Ideal`, by part.
        ratio: of rows.
        microbatches: of the baseline.
        tree_microbatches: of the tree.
    """
    constants = seconds["microbatches"] / tree_microbatches * microbatches
    return sum(seconds.values()) - seconds["microbatches"] + constants / ratio


def microbatch_constant(microbatches: Sequence[int], seconds: Sequence[float]) -> float:
    """Seconds of a microbatch whatever its rows, from one work that was cut differently; 0 if that cannot be told.

    The slope of a line through the points (least squares), at least 0. Only cuts of the same rows may be compared.
    """
    counts, times = np.asarray(microbatches, float), np.asarray(seconds, float)
    if len(np.unique(counts)) < 2:
        return 0.0
    return float(max(0.0, np.polyfit(counts, times, 1)[0]))
