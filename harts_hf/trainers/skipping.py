"""When an update's coefficients are known before any log-prob is: then the scoring pass is left out, exactly."""

from collections.abc import Sequence
from typing import Any

# Batch entries through which a loss compares the policy with other log-probs.
OTHER_LOG_PROBS = ("old_per_token_logps", "old_logps", "ref_per_token_logps", "importance_sampling_ratio")


def reason_to_score(trainer: Any, slices: Sequence[dict[str, Any]]) -> str | None:
    """The first setting or batch entry that makes TRL's coefficients depend on log-probs or entropies; None for none.

    Without any, the importance ratio is 1 wherever TRL differentiates it, so ``dL/dlogp`` can be taken at any
    placeholder. All of these are needed: no old log-probs (so generation aligned with optimizer steps and no
    importance-sampling correction of vLLM), no KL term, no entropy bonus, no entropy quantile, no off-policy mask and
    no auxiliary loss (which tree trainers refuse).
    """
    for one in slices:
        for name in OTHER_LOG_PROBS:
            if one.get(name) is not None:
                return name
    settings = (
        ("beta", getattr(trainer, "beta", 0.0) != 0.0),
        ("entropy_bonus", getattr(trainer, "_entropy_bonus_enabled", False)),
        ("top_entropy_quantile", getattr(trainer, "top_entropy_quantile", 1.0) < 1.0),
        ("off_policy_mask_threshold", getattr(trainer, "off_policy_mask_threshold", None) is not None),
    )
    return next((name for name, prevents in settings if prevents), None)
