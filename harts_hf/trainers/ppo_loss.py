"""The losses of PPO with a value head, of the trained tokens of one minibatch.

Sources: Schulman et al., "Proximal Policy Optimization Algorithms" (arXiv 1707.06347), equation 7 and section 5;
clipped values as in OpenAI's baselines (Huang et al., "The 37 Implementation Details of Proximal Policy Optimization",
2022, details 9 and 13); the estimator k3 of the KL divergence from Schulman, "Approximating KL Divergence" (2020), by
the ratio as in DeepSeek-V3.2 (arXiv 2512.02556), which TRL's GRPO multiplies it with, too.
"""

from dataclasses import dataclass

import torch

Sums = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class PolicyTerms:
    """What the terms of the policy's loss weigh.

    Attributes:
        clip_low: the ratio counts as at least ``1 - clip_low``.
        clip_high: and as at most ``1 + clip_high``.
        entropy_weight: of the entropy bonus.
        kl_weight: of the KL divergence from the reference, where it is part of the loss.
        kl_by_ratio: whether that term is multiplied by the ratio, which makes its gradient the reverse KL's.
    """

    clip_low: float
    clip_high: float
    entropy_weight: float = 0.0
    kl_weight: float = 0.0
    kl_by_ratio: bool = True


@dataclass(frozen=True, eq=False, kw_only=True)
class PolicyTokens:
    """Trained tokens, ``[T]`` each.

    Attributes:
        advantages: whitened or not.
        old_log_probs: of the policy that is updated, as it was after the rollouts.
        reference: log-probs of the reference model; None without one.
        weights: of each token's policy term (a correction for another sampler); None for 1.
    """

    advantages: torch.Tensor
    old_log_probs: torch.Tensor
    reference: torch.Tensor | None = None
    weights: torch.Tensor | None = None


def policy_loss(
    log_probs: torch.Tensor, entropies: torch.Tensor, tokens: PolicyTokens, terms: PolicyTerms
) -> tuple[torch.Tensor, Sums]:
    """The sum over tokens of ``-w min(r A, clip(r) A) - entropy_weight H + kl_weight k3``, r the ratio to the old.

    Args:
        log_probs: ``[T]``, what the loss is differentiated by.
        entropies: ``[T]``, likewise.
        tokens: what they are compared with.
        terms: weights.

    Returns:
        The loss, and detached sums over the tokens by name, for metrics.
    """
    log_ratio = log_probs - tokens.old_log_probs
    ratio, advantages = log_ratio.exp(), tokens.advantages
    free, clipped = ratio * advantages, ratio.clamp(1 - terms.clip_low, 1 + terms.clip_high) * advantages
    policy = -torch.minimum(free, clipped)
    if tokens.weights is not None:
        policy = policy * tokens.weights
    loss = policy
    if terms.entropy_weight:
        loss = loss - terms.entropy_weight * entropies
    sums = {
        "policy_loss": policy,
        "entropy": entropies,
        "approx_kl": ratio - 1 - log_ratio,
        "clip_ratio": (clipped < free).to(policy),
        "ratio": ratio,
    }
    if tokens.reference is not None:
        gap = tokens.reference - log_probs
        sums["kl"] = gap.exp() - gap - 1
        if terms.kl_weight:
            loss = loss + terms.kl_weight * (sums["kl"] * ratio if terms.kl_by_ratio else sums["kl"])
    return loss.sum(), _totals(sums)


def value_loss(
    values: torch.Tensor, returns: torch.Tensor, old_values: torch.Tensor, clip: float | None
) -> tuple[torch.Tensor, Sums]:
    """The sum over tokens of ``max((v - R)^2, (clipped v - R)^2) / 2``.

    Args:
        values: ``[T]``, what the loss is differentiated by.
        returns: ``[T]``, what values are trained towards.
        old_values: ``[T]``, values after the rollouts.
        clip: a value counts as moved by at most this from the old one; None for no clipping.

    Returns:
        The loss, and detached sums over the tokens by name, for metrics.
    """
    error = (values - returns).square()
    is_clipped = torch.zeros_like(error, dtype=torch.bool)
    if clip is not None:
        moved = (values - old_values).clamp(-clip, clip)
        clipped = (old_values + moved - returns).square()
        is_clipped, error = clipped > error, torch.maximum(error, clipped)
    sums = {"value_loss": 0.5 * error, "value_clip_ratio": is_clipped.to(error)}
    return sums["value_loss"].sum(), _totals(sums)


def _totals(sums: Sums) -> Sums:
    return {name: value.detach().double().sum() for name, value in sums.items()}
