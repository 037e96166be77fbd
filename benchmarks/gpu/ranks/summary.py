"""What the ranks of a training found together."""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.gathering import of_ranks
from benchmarks.gpu.ranks.step import TIMED, WARM, Steps


def slowest(values: Sequence[float]) -> list[float]:
    """The largest of each over the ranks; a collective."""
    return [max(ranks) for ranks in zip(*of_ranks(values), strict=True)]


def lockstep(ops: Sequence[Sequence[float]]) -> float:
    """Seconds of ranks that wait for one another in each op."""
    return sum(map(max, zip(*ops, strict=True)))


def summaries(trainer: Any, steps: Steps) -> list[dict[str, Any]]:
    """One for each phase; a collective."""
    seconds, inside, peaks = (slowest(values) for values in (steps.seconds, steps.inside, steps.peaks))
    estimated = [lockstep(step) for step in zip(*of_ranks(steps.ops), strict=True)]
    logs = [log for log in trainer.state.log_history if "loss" in log]
    found = []
    for place, phase in enumerate(steps.phases):
        first, end = place * (WARM + TIMED), (place + 1) * (WARM + TIMED)
        timed, log = slice(first + WARM, end), logs[end - 1]
        tree = {name.removeprefix("tree/"): value for name, value in log.items() if name.startswith("tree/")}
        found.append({
            "execution": phase.execution, "placement": phase.placement, "variant": phase.variant,
            "scoring_skipped": bool(tree["scoring_skipped"]), "ops": len(steps.ops[end - 1]),
            "seconds": statistics.median(seconds[timed]), "seconds_of_steps": seconds[first:end],
            "forward_backward_seconds": statistics.median(inside[timed]),
            "forward_backward_seconds_of_steps": inside[first:end],
            "estimated_seconds": estimated[end - 1],
            "exchange_seconds": statistics.median(one.get("tree/exchange_seconds", 0.0) for one in logs[timed]),
            "peak_memory": max(peaks[timed]),
            "loss": [one["loss"] for one in logs[timed]], "entropy": [one["entropy"] for one in logs[timed]],
            "grad_norm": [one["grad_norm"] for one in logs[timed]],
            "tree": tree,
        })  # fmt: skip
    return found
