"""How the rows of an optimizer step weigh in its loss, where episodes have different numbers of samples.

TRL's losses average over what a slice (a micro-step) holds, and slices and ranks are averaged in turn. That is the
mean over the step only if they hold equally much, so a slice's loss is scaled to what it would weigh in that mean:

- a mean over rows (``grpo``, ``sapo``, ``luspo``, ``dr_grpo``, GMPO): by rows x slices x ranks / all rows of the step;
- a mean over the slice's tokens (``bnpo``): likewise by tokens;
- tokens over those of the whole generation batch (``dapo``, ``cispo``, ``vespo``): not at all.

Where each row is to weigh as a part of its episode (``tree_episode_weight="episode"``), its derivatives and its part
of the logged loss are multiplied by its weight, and the normalisers above count weighted rows and weighted tokens.

The whole loss of a slice is scaled, an entropy bonus with it: TRL takes that as a mean over the slice's tokens, so
slices weigh in it as they do in the policy's term. "The step" is the optimizer step, also where a generation batch
lasts for several (``steps_per_generation > gradient_accumulation_steps``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from harts_hf.runtime.leaves import check_reach
from harts_hf.trainers.ranks import AccelerateRanks

Unit = Literal["rows", "tokens", "batch"]
UNITS: dict[str, Unit] = {
    **dict.fromkeys(("grpo", "sapo", "luspo", "dr_grpo"), "rows"),
    "bnpo": "tokens",
    **dict.fromkeys(("dapo", "cispo", "vespo"), "batch"),
}
# Entries of TRL's batch that are ours.
WEIGHTS = "episode_weights"  # [B]; 0 for a row that stands for no rollout, in which nothing is trained
WEIGHTED_ITEMS = "weighted_items_in_batch"  # scalar: trained tokens of the generation batch, all ranks, weighted

# Below it, the k3 ratio is taken from its series: the closed form loses digits there.
_SMALL = 1e-3
# What parts of a loss may differ from it by, relative to their magnitudes, before they are said not to make it up.
_ROUNDING = 1e-3


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """What the slices of an optimizer step hold together.

    Attributes:
        slices: of each rank.
        ranks: processes.
        rows: weighted, of all slices and ranks.
        tokens: trained ones, weighted, of all slices and ranks.
        even: whether all slices of all ranks have equally many rows, of weight 1.
    """

    slices: int
    ranks: int
    rows: float
    tokens: float
    even: bool

    @classmethod
    def of(cls, batches: Sequence[Mapping[str, Any]], ranks: AccelerateRanks) -> "StepTotals":
        """Of this rank's batches and every other's; a collective where there are several ranks."""
        counts = [len(batch[WEIGHTS]) for batch in batches]
        sums = {
            "rows": sum(float(batch[WEIGHTS].double().sum()) for batch in batches),
            "tokens": sum(_tokens(batch) for batch in batches),
        }
        is_plain = all(bool((batch[WEIGHTS] == 1).all()) for batch in batches)
        sums, largest = ranks.totals(
            sums, {"most": max(counts), "fewest": -min(counts), "weighed": float(not is_plain)}
        )
        even = largest["most"] == -largest["fewest"] and not largest["weighed"]
        return cls(slices=len(batches), ranks=ranks.count, even=even, **sums)

    def factor(self, batch: Mapping[str, Any], unit: Unit) -> float:
        """What TRL's loss of a slice is multiplied by; see the module."""
        if self.even:
            return 1.0
        if unit == "batch":
            return float(batch["num_items_in_batch"].clamp(min=1.0)) / max(float(batch[WEIGHTED_ITEMS]), 1e-9)
        held, total = (
            (len(batch[WEIGHTS]), self.rows)
            if unit == "rows"
            else (float(trained(batch).sum().clamp(min=1)), self.tokens)
        )
        return held * self.slices * self.ranks / total if total else 1.0


def weighed_loss(
    loss_of: Callable[[torch.Tensor, torch.Tensor, dict[str, Any]], torch.Tensor],
    batch: Mapping[str, Any],
    log_probs: torch.Tensor,
    entropies: torch.Tensor,
) -> torch.Tensor:
    """TRL's loss of a slice with each row's terms multiplied by the row's weight.

    TRL returns the sum of all rows' terms. It is taken apart by what each term is proportional to: the policy's to the
    advantages (clipped, too: a minimum of two multiples), the entropy bonus to the entropies (Euler's theorem gives
    both), and the KL term's value follows from its derivative by the reference's log-probs, as TRL's estimator k3
    (Schulman, "Approximating KL divergence", 2020) is known.

    Args:
        loss_of: the loss of log-probs, entropies and a batch.
        batch: TRL's, with ``episode_weights`` [B].
        log_probs: ``[B, C]`` leaf.
        entropies: ``[B, C]`` leaf.

    Returns:
        A scalar whose derivatives by the leaves are the weighted ones.

    Raises:
        ValueError: a loss that has other terms (a loss of the user's own), or reaches other trainable tensors.
    """
    inner = {"log_probs": log_probs, "entropies": entropies, "advantages": batch["advantages"]}
    reference = batch.get("ref_per_token_logps")
    if reference is not None:
        inner["reference"] = reference
    with torch.enable_grad():
        inner = {name: value.detach().clone().requires_grad_() for name, value in inner.items()}
        replaced = {**batch, "advantages": inner["advantages"]}
        if reference is not None:
            replaced["ref_per_token_logps"] = inner["reference"]
        loss = loss_of(inner["log_probs"], inner["entropies"], replaced)
    check_reach(loss, list(inner.values()))
    gradients = dict(zip(inner, torch.autograd.grad(loss, list(inner.values()), allow_unused=True), strict=True))

    parts = [
        inner[name].detach() * gradients[name] for name in ("advantages", "entropies") if gradients[name] is not None
    ]
    if gradients.get("reference") is not None:
        parts.append(
            gradients["reference"] * _k3_over_its_derivative((inner["reference"] - inner["log_probs"]).detach())
        )
    per_row = [part.double().reshape(len(part), -1).sum(dim=1) for part in parts]
    total, magnitude = sum(part.sum() for part in per_row), sum(part.double().abs().sum() for part in parts)
    # Near the reference, k3 is nothing but the rounding of its terms, of size 1 at each token.
    eps = max(torch.finfo(value.dtype).eps for value in (loss, log_probs))
    floor = eps * log_probs.shape[1] if reference is not None else 1e-12
    said = loss.item()
    if abs(said - float(total)) > _ROUNDING * float(magnitude) + floor:
        raise ValueError(
            "expected a loss whose policy, KL and entropy terms make it up with tree_episode_weight='episode', got "
            f"{said} of which they are {float(total)}: use tree_episode_weight='sample'"
        )
    weights = batch[WEIGHTS].to(loss.device)
    value = sum((part * weights).sum() for part in per_row)
    weighed = torch.as_tensor(value, dtype=loss.dtype, device=loss.device)
    for leaf, name in ((log_probs, "log_probs"), (entropies, "entropies")):
        if gradients[name] is not None:
            weighed = weighed + ((leaf - leaf.detach()) * (gradients[name] * weights[:, None])).sum()
    return weighed


def _k3_over_its_derivative(difference: torch.Tensor) -> torch.Tensor:
    """``(e^d - d - 1) / (e^d - 1)`` at d = reference - policy."""
    large = torch.where(difference.abs() < _SMALL, 1.0, difference)
    exact = (torch.expm1(large) - large) / torch.expm1(large)
    return torch.where(difference.abs() < _SMALL, difference / 2 - difference**2 / 12, exact)


def trained(batch: Mapping[str, Any]) -> torch.Tensor:
    """``[B, C]``, 1 at tokens of completions that are trained: not those of padding, tools or environments."""
    tools = batch.get("tool_mask")
    return batch["completion_mask"] if tools is None else batch["completion_mask"] * tools


def _tokens(batch: Mapping[str, Any]) -> float:
    return float((trained(batch).sum(dim=1) * batch[WEIGHTS]).double().sum())


def check_keys(batches: Sequence[Mapping[str, Any]]) -> None:
    """Refuses an optimizer step of which some micro-steps alone have episodes.

    Raises:
        ValueError: see above.
    """
    with_episodes = [WEIGHTS in batch for batch in batches]
    if any(with_episodes) and not all(with_episodes):
        raise ValueError(
            "expected the key 'episode' from all calls of the rollout function within an optimizer step or from "
            f"none, got it for {sum(with_episodes)} of {len(batches)} micro-steps"
        )
