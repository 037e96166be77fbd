"""The loss of PPO with a value head, of the trained tokens of one slice.

Sources: Schulman et al., "Proximal Policy Optimization Algorithms" (arXiv 1707.06347), equation 7 and section 5;
clipped values as in OpenAI's baselines (Huang et al., "The 37 Implementation Details of Proximal Policy Optimization",
2022, details 9 and 13); the estimator k3 of the KL divergence from Schulman, "Approximating KL Divergence" (2020).
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class PPOTerms:
    """What the terms of the loss weigh.

    Attributes:
        clip: epsilon of the policy's ratio, ``[1 - clip, 1 + clip]``.
        clip_value: a value counts as moved by at most this from the old one; None for no clipping.
        value_weight: of the value loss.
        entropy_weight: of the entropy bonus.
        kl_weight: of the KL divergence from the reference, where it is part of the loss.
        policy_weight: 0 while only the value head is trained, 1 afterwards.
    """

    clip: float
    clip_value: float | None
    value_weight: float
    entropy_weight: float = 0.0
    kl_weight: float = 0.0
    policy_weight: float = 1.0


@dataclass(frozen=True, eq=False, kw_only=True)
class PPOTokens:
    """Trained tokens, ``[T]`` each: ``old_*`` and ``reference`` as they were after the rollouts.

    Attributes:
        advantages: whitened or not.
        returns: what values are trained towards.
        old_log_probs: of the policy that is updated.
        old_values: of its value head.
        reference: log-probs of the reference model; None without one.
    """

    advantages: torch.Tensor
    returns: torch.Tensor
    old_log_probs: torch.Tensor
    old_values: torch.Tensor
    reference: torch.Tensor | None = None


def ppo_loss(
    log_probs: torch.Tensor,
    entropies: torch.Tensor,
    values: torch.Tensor,
    tokens: PPOTokens,
    terms: PPOTerms,
    num_tokens: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The sum over tokens of all terms, divided by ``num_tokens``.

    ``-min(r A, clip(r) A) + value_weight / 2 * max((v - R)^2, (clipped v - R)^2) - entropy_weight H + kl_weight k3``,
    with ``r = exp(log_prob - old_log_prob)``.

    Args:
        log_probs, entropies, values: ``[T]``, what the loss is differentiated by.
        tokens: what they are compared with.
        terms: weights.
        num_tokens: of the whole optimizer step, so that slices and ranks add up to its mean.

    Returns:
        The loss, and detached sums over the tokens by name, for metrics.
    """
    log_ratio = log_probs - tokens.old_log_probs
    ratio = log_ratio.exp()
    advantages = tokens.advantages
    policy = -torch.minimum(ratio * advantages, ratio.clamp(1 - terms.clip, 1 + terms.clip) * advantages)
    value_error = (values - tokens.returns).square()
    is_clipped = torch.zeros_like(value_error, dtype=torch.bool)
    if terms.clip_value is not None:
        moved = (values - tokens.old_values).clamp(-terms.clip_value, terms.clip_value)
        clipped_error = (tokens.old_values + moved - tokens.returns).square()
        is_clipped = clipped_error > value_error
        value_error = torch.maximum(value_error, clipped_error)
    loss = terms.policy_weight * policy + terms.value_weight * 0.5 * value_error
    if terms.entropy_weight:
        loss = loss - terms.policy_weight * terms.entropy_weight * entropies
    sums = {
        "policy_loss": policy,
        "value_loss": 0.5 * value_error,
        "entropy": entropies,
        "approx_kl": ratio - 1 - log_ratio,
        "clip_ratio": (ratio * advantages > ratio.clamp(1 - terms.clip, 1 + terms.clip) * advantages).to(policy),
        "value_clip_ratio": is_clipped.to(policy),
        "ratio": ratio,
    }
    if tokens.reference is not None:
        gap = tokens.reference - log_probs
        kl = gap.exp() - gap - 1
        sums["kl"] = kl
        if terms.kl_weight:
            loss = loss + terms.policy_weight * terms.kl_weight * kl
    return loss.sum() / num_tokens, {name: value.detach().double().sum() for name, value in sums.items()}


def whiten(advantages: torch.Tensor, mean: float, variance: float) -> torch.Tensor:
    """To mean 0 and variance 1, of a mean and a variance over all trained tokens of all ranks."""
    return (advantages - mean) / (variance + 1e-8) ** 0.5
