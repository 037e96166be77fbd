"""Metrics ``tree/*`` of an optimizer step, over all ranks."""

from harts_hf.runtime.update import UpdateReport
from harts_hf.trainers.ranks import AccelerateRanks


def tree_metrics(report: UpdateReport, ranks: AccelerateRanks) -> dict[str, float]:
    """What an update did, the same on every rank; a collective where there are several.

    Counts are summed over the ranks; seconds, differences and yes-or-no metrics are the largest of any rank.
    """
    schedule = report.window.schedule
    counts: dict[str, float] = {
        "expanded_tokens": report.window.rollout_tree.num_expanded_tokens,
        "forward_tokens": schedule.forward_tokens,
        "backward_tokens": schedule.backward_tokens,
        "replay_tokens": schedule.replay_tokens,
        "linear_calls": schedule.linear_calls,
        "microbatches": len(schedule.microbatches),
        "oversized_microbatches": len(schedule.oversized),
    }
    largest: dict[str, float] = {
        "logp_recompute_maxdiff": report.recompute_difference,
        "limits_raised": report.limits_raised,
        "scoring_skipped": report.scoring_skipped,
        **{f"{name}_seconds": value for name, value in report.seconds.items()},
    }
    counts, largest = ranks.totals(counts, largest)
    # What was reached, not what the tokens would allow: a feature that does nothing has to show.
    found = {"sharing_ratio": counts["expanded_tokens"] / counts["backward_tokens"], **counts, **largest}
    if report.scoring_needed_by is not None:
        found[f"scoring_needed_by/{report.scoring_needed_by}"] = 1.0
    return {name: float(value) for name, value in found.items()}
