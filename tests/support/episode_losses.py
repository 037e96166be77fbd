"""The losses of one sample, by their formulas, in plain code: what a loop over samples adds up.

Sources, with A the advantage, r = pi/pi_old, t a trained token, |o| their number: GRPO (arXiv 2402.03300), DAPO
(2503.14476), Dr. GRPO (2503.20783), GSPO's sequence ratio (2507.18071), GMPO (2507.20673), CISPO (2506.13585), SAPO
(2511.20347), VESPO (2602.10693), and, where TRL differs from them, its documentation. Sequences are masked by the rule
of DeepSeek-V3.2 (2512.02556).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "gmpo")


@dataclass(kw_only=True)
class Row:
    """A sample with everything that its loss needs.

    Attributes:
        prompt: token ids.
        completion: ``C`` token ids.
        mask: ``[C]`` 1 where a token is trained.
        sampled: ``[C]`` log-probs that the sampler reported.
        weight: of the row in the step's loss.
        advantage: ``[1]`` or ``[C]``.
        old: ``[C]`` log-probs when it was generated, or None where those of the step itself are meant.
        reference: ``[C]`` log-probs of the reference model, or None.
    """

    prompt: list[int]
    completion: list[int]
    mask: Tensor
    sampled: Tensor
    weight: float = 1.0
    advantage: Tensor | None = None
    old: Tensor | None = None
    reference: Tensor | None = None

    @property
    def count(self) -> Tensor:
        """Trained tokens."""
        return self.mask.sum()

    def sum(self, values: Tensor) -> Tensor:
        """Sum of ``[C]`` or ``[1]`` values over the trained tokens."""
        return (values * self.mask).sum()

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the trained tokens; 0 if there are none."""
        return self.sum(values) / self.count.clamp(min=1)


def log_ratio(row: Row, log_probs: Tensor) -> Tensor:
    """``[C]`` log r."""
    return log_probs - (log_probs.detach() if row.old is None else row.old)


def ratio(row: Row, log_probs: Tensor, args: Any) -> Tensor:
    """``[C]`` r of tokens, or ``[1]`` their geometric mean."""
    by_token = log_ratio(row, log_probs)
    return (row.mean(by_token)[None] if args.importance_sampling_level == "sequence" else by_token).exp()


def bounds(args: Any) -> tuple[float, float]:
    """How far a ratio may go below and above 1."""
    return args.epsilon, args.epsilon if args.epsilon_high is None else args.epsilon_high


def divergence(row: Row, log_probs: Tensor, args: Any, *, gmpo: bool = False) -> Tensor:
    """``[C]`` the estimator e^d - d - 1, d = log pi_ref - log pi; times r where its bias is corrected."""
    assert row.reference is not None
    d = row.reference - log_probs
    kl = d.exp() - d - 1
    return kl * ratio(row, log_probs, args) if args.use_bias_correction_kl and not gmpo else kl


def is_kept(row: Row, log_probs: Tensor, args: Any) -> Tensor:
    """``[1]`` or ``[C]``: false for a sequence of negative advantage that has drifted too far."""
    assert row.advantage is not None
    if args.off_policy_mask_threshold is None:
        return torch.ones(1)
    drift = row.mean(row.sampled - log_probs.detach())
    return ((row.advantage >= 0) | (drift <= args.off_policy_mask_threshold)).double()


def vespo_weight(row: Row, log_probs: Tensor, args: Any) -> Tensor:
    """``[1]`` phi(w) = e^lambda w^k e^(-lambda w) of the sequence's ratio w, a constant."""
    assert row.advantage is not None
    log_w = row.sum(log_ratio(row, log_probs).detach().clamp(-20, 20)).clamp(torch.tensor(1e-8).log(), 20)
    good = row.advantage >= 0
    k = torch.where(good, args.vespo_k_pos, args.vespo_k_neg).double()
    rate = torch.where(good, args.vespo_lambda_pos, args.vespo_lambda_neg).double()
    return (rate + k * log_w - rate * log_w.exp()).exp()


def token_losses(row: Row, log_probs: Tensor, args: Any, loss_type: str) -> Tensor:
    """``[C]`` or ``[1]`` (one for all tokens): policy loss and KL of each token."""
    advantage, r = row.advantage, ratio(row, log_probs, args)
    assert advantage is not None
    low, high = bounds(args)
    if loss_type == "cispo":
        loss = -r.clamp(max=high).detach() * advantage * log_probs
    elif loss_type == "sapo":
        tau = torch.where(advantage > 0, args.sapo_temperature_pos, args.sapo_temperature_neg)
        loss = -4 / tau * torch.sigmoid(tau * (r - 1)) * advantage
    elif loss_type == "vespo":
        loss = -vespo_weight(row, log_probs, args) * advantage * log_probs
    else:
        capped = r if args.delta is None else r.clamp(max=args.delta)
        loss = -torch.minimum(capped * advantage, r.clamp(1 - low, 1 + high) * advantage)
    loss = loss * is_kept(row, log_probs, args)
    return loss + args.beta * divergence(row, log_probs, args) if args.beta else loss


def row_loss(row: Row, log_probs: Tensor, args: Any, loss_type: str) -> Tensor:
    """The row's own loss where the step's is a mean of rows."""
    if loss_type == "gmpo":
        low, high = bounds(args)
        by_token, advantage = log_ratio(row, log_probs), row.advantage
        assert advantage is not None
        clipped = by_token.clamp(-low, high)
        kept = torch.where(advantage > 0, torch.minimum(by_token, clipped), torch.maximum(by_token, clipped))
        loss = -row.mean(kept).exp() * advantage[0]
        return loss + args.beta * row.mean(divergence(row, log_probs, args, gmpo=True)) if args.beta else loss
    losses = token_losses(row, log_probs, args, loss_type)
    if loss_type == "dr_grpo":
        return row.sum(losses) / args.max_completion_length
    return row.sum(losses) if loss_type == "luspo" else row.mean(losses)


def clipping(row: Row, log_probs: Tensor, args: Any, loss_type: str) -> dict[str, Tensor]:
    """``[C]`` or ``[1]`` for each metric of clipping: 1 where it is."""
    advantage = row.advantage
    assert advantage is not None
    low, high = bounds(args)
    r = ratio(row, log_probs, args)
    if loss_type == "vespo":
        return {"vespo/phi_seq_mean": vespo_weight(row, log_probs, args)}
    if loss_type == "cispo":
        return {"cispo_clip_ratio": ((r > high) & (advantage > 0)).double()}
    if loss_type == "sapo":
        return {}
    if loss_type == "gmpo":
        by_token = log_ratio(row, log_probs)
        below, above = by_token < -low, by_token > high
    else:
        r = r if args.delta is None else r.clamp(max=args.delta)
        below, above = r < 1 - low, r > 1 + high
    below, above = below & (advantage < 0), above & (advantage > 0)
    found = {"clip_ratio/low": below, "clip_ratio/high": above, "clip_ratio/region": below | above}
    return {name: value.double() for name, value in found.items()}
