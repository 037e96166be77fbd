"""When an update's coefficients are known before any log-prob is: then the scoring pass is left out, exactly."""

from typing import Any

from harts_hf.trainers.origins import is_from
from harts_hf.trainers.router_loss import has_router_loss

# Batch entries through which a loss compares the policy with other log-probs.
OTHER_LOG_PROBS = ("old_per_token_logps", "old_logps", "ref_per_token_logps", "importance_sampling_ratio")

# What a trainer's loss is made of. In a subclass each may turn log-probs into coefficients.
LOSS_METHODS = (
    "compute_loss",
    "_compute_loss",
    "_get_per_token_logps_and_entropies",
    "get_high_entropy_mask",
    "get_off_policy_mask",
    "get_gamma_weights",
)


def reason_to_score(trainer: Any, batch: dict[str, Any]) -> str | None:
    """The first entry of TRL's batch, or setting, that makes coefficients depend on log-probs or entropies, or None.

    Without any, the importance ratio is 1 wherever TRL differentiates it, so ``dL/dlogp`` can be taken at any
    placeholder. All of these are needed: no old log-probs (so generation aligned with optimizer steps and no
    importance-sampling correction of vLLM), no KL term, no entropy bonus, no entropy quantile, no off-policy mask, no
    auxiliary loss of a router (whose coefficients are the fractions of the choices) and no loss of the user's own.
    """
    for name in OTHER_LOG_PROBS:
        if batch.get(name) is not None:
            return name
    settings = (
        ("beta", getattr(trainer, "beta", 0.0) != 0.0),
        ("entropy_bonus", getattr(trainer, "_entropy_bonus_enabled", False)),
        ("top_entropy_quantile", getattr(trainer, "top_entropy_quantile", 1.0) < 1.0),
        ("router_aux_loss", has_router_loss(trainer)),
        ("off_policy_mask_threshold", getattr(trainer, "off_policy_mask_threshold", None) is not None),
    )
    return next((name for name, prevents in settings if prevents), "custom_loss" if has_custom_loss(trainer) else None)


def has_custom_loss(trainer: Any) -> bool:
    """Whether a part of the loss is neither TRL's nor ours: overridden in a subclass, replaced on the instance."""
    methods = [getattr(trainer, name) for name in LOSS_METHODS if hasattr(trainer, name)]
    return not all(is_from(method, "trl", "harts_hf") for method in methods)
