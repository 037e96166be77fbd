"""What an update did."""

from dataclasses import dataclass, field

import torch

from harts_hf.runtime.placing import Placement
from harts_hf.runtime.replayed import RoutingCounts
from harts_hf.runtime.window import TreeWindow


@dataclass(frozen=True, eq=False, kw_only=True)
class UpdateReport:
    """What an update did.

    Attributes:
        loss: the sum of the slices' losses, detached.
        window: what was planned and run; in global placement the same forest and schedule on all ranks.
        placement: "global" if the window holds all ranks' trajectories, "local" if this rank's own.
        limits_raised: whether a limit of the plan could not be kept.
        scoring_skipped: whether the scoring pass of a cut plan was left out. (A window of one microbatch has none: its
            one forward scores and trains.)
        scoring_kept: whether the losses saw what an earlier pass on the same weights had scored.
        scoring_needed_by: what made one necessary; None where nothing did.
        recompute_difference: the largest difference of a log-prob computed again from its score.
        seconds: of ``planning``, ``scoring``, ``backward``; on several ranks, ``exchange`` is the part of them in
            which ranks exchanged numbers and waited for one another outside forwards and backwards.
        exchanged_bytes: what this rank got from the others: token ids, values, coefficients.
        sums: over the trajectories of all ranks, of the names that were observed.
        routing: what came of choices of experts that were replayed here.
    """

    loss: torch.Tensor
    window: TreeWindow
    placement: Placement
    limits_raised: bool
    scoring_skipped: bool
    scoring_needed_by: str | None
    recompute_difference: float
    seconds: dict[str, float] = field(default_factory=dict)
    exchanged_bytes: int = 0
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    routing: RoutingCounts = field(default_factory=RoutingCounts)
    scoring_kept: bool = False
