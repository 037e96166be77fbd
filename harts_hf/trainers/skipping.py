"""When an update's coefficients are known before any log-prob is: then the scoring pass is left out, exactly."""

from collections.abc import Sequence
from typing import Any

import torch

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

# Placeholders for log-probs and entropies: what no token has, then values over the range that tokens have.
PLACEHOLDER_RANGES = ((0.0, 0.0), (1e-3, 30.0))


def reason_to_score(trainer: Any, slices: Sequence[dict[str, Any]]) -> str | None:
    """The first setting or batch entry that makes TRL's coefficients depend on log-probs or entropies; None for none.

    Without any, the importance ratio is 1 wherever TRL differentiates it, so ``dL/dlogp`` can be taken at any
    placeholder. All of these are needed: no old log-probs (so generation aligned with optimizer steps and no
    importance-sampling correction of vLLM), no KL term, no entropy bonus, no entropy quantile, no off-policy mask, no
    auxiliary loss (which tree trainers refuse) and no loss of the user's own.
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
    return next((name for name, prevents in settings if prevents), "custom_loss" if has_custom_loss(trainer) else None)


def has_custom_loss(trainer: Any) -> bool:
    """Whether a part of the loss is neither TRL's nor ours: overridden in a subclass, replaced on the instance."""
    methods = [getattr(trainer, name) for name in LOSS_METHODS if hasattr(trainer, name)]
    return any(method.__module__.partition(".")[0] not in ("trl", "harts_hf") for method in methods)


def placeholders(num_rows: int, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of log-probs and entropies, ``[num_rows]`` float32 each: coefficients that differ depend on values."""
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for low, high in PLACEHOLDER_RANGES:
        draws = torch.rand(2, num_rows, generator=generator)
        log_probs, entropies = (low * (high / low) ** draws if low else torch.zeros_like(draws)).to(device)
        pairs.append((-log_probs, entropies))
    return pairs


def check_reach(loss: torch.Tensor, leaves: Sequence[torch.Tensor]) -> None:
    """Refuses a loss that reaches a trainable tensor other than the log-probs and entropies it was given.

    A loss of the user's own may run the model itself; only its derivatives by the leaves are taken, so that part of
    its gradient would be lost.

    Raises:
        ValueError: there is such a tensor; the message gives its shape.
    """
    given = {id(leaf) for leaf in leaves}
    seen: set[Any] = set()
    open_nodes: list[Any] = [loss.grad_fn]
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in given:
            raise ValueError(
                "expected a loss of the log-probs and entropies of _get_per_token_logps_and_entropies alone, got one "
                f"that also reaches a trainable tensor of shape {list(variable.shape)}: a tree trainer takes its "
                "derivatives by log-probs and entropies, so that part of the gradient would be lost"
            )
        open_nodes += [parent for parent, _ in node.next_functions]
