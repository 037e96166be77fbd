"""Metrics ``tree/*`` of an optimizer step, over all ranks."""

from harts_hf.planner import Schedule
from harts_hf.planner.spans import span_size, union
from harts_hf.runtime.report import UpdateReport
from harts_hf.trainers.old_logprobs import Agreement, OldLogProbs
from harts_hf.trainers.ranks import AccelerateRanks
from harts_hf.trainers.routing_replay import RoutingReplay, routing_metrics


def tree_metrics(
    report: UpdateReport, ranks: AccelerateRanks, replay: RoutingReplay, old: OldLogProbs
) -> dict[str, float]:
    """What an update did, the same on every rank; a collective where there are several.

    Args:
        report: of the update.
        ranks: of the training.
        replay: of routes.
        old: what was found of recorded log-probs.

    Where routes are replayed, there are those of :func:`harts_hf.trainers.routing_replay.routing_metrics`. Counts are
    of all ranks together; seconds, differences and yes-or-no metrics are the largest of any rank. With several ranks
    there are also

    - ``balance``: estimated seconds of a rank's own ops, the mean over ranks divided by the largest;
    - ``global_placement``: whether ranks shared one forest;
    - ``repeated_tokens``, where they did: rows that a rank computed although another did too;
    - ``exchanged_bytes``: token ids, values and coefficients that a rank got, of the rank that got most.
    """
    schedule = report.window.schedule
    is_global = report.window.is_of_all_ranks
    counts: dict[str, float] = {
        "expanded_tokens": report.window.rollout_tree.num_expanded_tokens,
        "unique_tokens": report.window.rollout_tree.num_tokens,
        "forward_tokens": schedule.forward_tokens,
        "backward_tokens": schedule.backward_tokens,
        "replay_tokens": schedule.replay_tokens,
        "microbatches": len(schedule.microbatches),
        "oversized_microbatches": len(schedule.oversized),
        "linear_calls": schedule.linear_calls,
    }
    routing = replay.counts(report.routing)
    compared, furthest = old.sums()
    largest: dict[str, float] = {
        "logp_recompute_maxdiff": report.recompute_difference,
        "limits_raised": report.limits_raised,
        "scoring_skipped": report.scoring_skipped,
        "scoring_kept": report.scoring_kept,
        **{f"{name}_seconds": value for name, value in report.seconds.items()},
        **furthest,
    }
    if ranks.count > 1:
        own = own_seconds(schedule, report.window.rank or 0)
        largest |= {"global_placement": is_global, "exchanged_bytes": report.exchanged_bytes, "slowest": own}
        (summed, largest) = ranks.totals({**counts, **routing, **compared, "seconds": own}, largest)
        routing = {name: summed.pop(name) for name in routing}
        compared = {name: summed.pop(name) for name in compared}
        mean, slowest = summed.pop("seconds") / ranks.count, largest.pop("slowest")
        largest["balance"] = mean / slowest if slowest else 1.0
        # A plan for all ranks has counted the work of all of them already.
        counts = {**counts, "repeated_tokens": repeated_tokens(schedule)} if is_global else summed
    furthest = {name: largest.pop(name) for name in furthest}
    # What was reached, not what the tokens would allow: a feature that does nothing has to show.
    found = {"sharing_ratio": counts["expanded_tokens"] / counts["backward_tokens"], **counts, **largest}
    found |= routing_metrics(routing, is_of_engine=replay.mode == "engine")
    if compared:
        found |= old.metrics(Agreement(**compared, **furthest))
    if report.scoring_needed_by is not None:
        found[f"scoring_needed_by/{report.scoring_needed_by}"] = 1.0
    return {name: float(value) for name, value in found.items()}


def own_seconds(schedule: Schedule, rank: int) -> float:
    """Estimated seconds of a rank's own ops, one after another, without waiting for others."""
    return sum(schedule.op_seconds(op) for op in schedule.ops(rank, dummies=False))


def repeated_tokens(schedule: Schedule) -> int:
    """Rows of the forest that ranks compute although one before them does: a row on ``k`` ranks is ``k - 1``."""
    by_rank = [
        [microbatch.row_spans for microbatch in schedule.microbatches if microbatch.rank == rank]
        for rank in range(schedule.config.world_size)
    ]
    return sum(span_size(union(spans)) for spans in by_rank if spans) - schedule.tree.num_tokens
