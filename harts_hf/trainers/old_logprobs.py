"""How far recorded log-probs are from the policy's own before any weight has moved, what is clipped, and why.

At the first optimizer step after rollouts came, the policy is the one that they are compared with, so the ratio of
PPO's objective should be 1. It is not where old log-probs were computed elsewhere, by an engine or by other weights;
what lies outside the clipping range then trains nothing (or, by the sign of its advantage, is not held back).
"""

import logging
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from harts_hf.modeling import LOG_PROB
from harts_hf.runtime.job import Leaves
from harts_hf.trainers.micro_steps import TRLSlice
from harts_hf.trainers.weighing import trained

_logger = logging.getLogger(__name__)

# Differences of another source are taken for roundings up to this much of what batching differently does.
ROUNDING_FACTOR = 3.0
# A mean difference of so many of its own standard errors, and of this part of the root mean square, is no accident.
STANDARD_ERRORS, ONE_SIDED = 4.0, 0.25
# Part of the trained tokens outside the range that is warned of.
MOST_CLIPPED = 0.01


class LogRange(NamedTuple):
    """Log-ratios that a loss does not clip."""

    low: float
    high: float

    @classmethod
    def of(cls, epsilon_low: float, epsilon_high: float) -> "LogRange":
        """``[1 - epsilon_low, 1 + epsilon_high]``, as PPO has it."""
        return cls(math.log(1 - epsilon_low) if epsilon_low < 1 else -math.inf, math.log1p(epsilon_high))


UNCLIPPED = LogRange(-math.inf, math.inf)


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Sums over trained tokens of ``new - old`` log-probs, in nats.

    Attributes:
        tokens: compared.
        outside: of them, those whose ratio a loss clips.
        total: of the differences.
        absolute: of their absolute values.
        squares: of their squares.
        largest: absolute value.
    """

    tokens: float
    outside: float
    total: float
    absolute: float
    squares: float
    largest: float

    @property
    def clipped(self) -> float:
        """Part of the tokens."""
        return self.outside / self.tokens if self.tokens else 0.0

    @property
    def mean(self) -> float:
        """Difference."""
        return self.total / self.tokens if self.tokens else 0.0

    @property
    def mean_absolute(self) -> float:
        """Difference without its sign."""
        return self.absolute / self.tokens if self.tokens else 0.0

    @property
    def rms(self) -> float:
        """Root mean square of the differences."""
        return math.sqrt(self.squares / self.tokens) if self.tokens else 0.0

    def cause(self, noise: float | None) -> str:
        """The likely cause, in words.

        Args:
            noise: root mean square of what batching differently does to the policy's own log-probs; None if that was
                not measured.
        """
        if noise is not None and self.rms <= ROUNDING_FACTOR * noise:
            return "roundings: as much as batching differently does here"
        spread = math.sqrt(max(self.rms**2 - self.mean**2, 0.0) / self.tokens) if self.tokens else 0.0
        if abs(self.mean) > max(STANDARD_ERRORS * spread, ONE_SIDED * self.rms):
            return (
                f"one-sided ({self.mean:+.3g} nats on average), so no roundings: other weights, another temperature, "
                "or log-probs of a truncated distribution"
            )
        if noise is None:
            return (
                f"to both sides alike ({self.rms:.3g} nats root mean square), so roundings of an engine of lower "
                "precision, experts that flip, or slightly other weights"
            )
        return (
            f"{self.rms / noise:.0f} times what batching differently does here: other weights, or an engine of lower "
            "precision"
            if noise
            else "other weights, or an engine of lower precision: batching differently changes nothing here"
        )


def sums_of(difference: torch.Tensor, ratios: torch.Tensor, allowed: LogRange) -> torch.Tensor:
    """``[6]`` float64: the fields of :class:`Agreement`, of any number of tokens.

    Args:
        difference: ``[T]`` log-probs, new less old.
        ratios: ``[T]`` logs of the ratios that the loss clips: the same, or of whole rows.
        allowed: where nothing is clipped.
    """
    difference = difference.double()
    outside = ((ratios < allowed.low) | (ratios > allowed.high)).double()
    size = difference.abs()
    largest = size.max() if len(size) else size.sum()
    return torch.stack(
        [
            torch.full_like(largest, len(size)),
            outside.sum(),
            difference.sum(),
            size.sum(),
            difference.square().sum(),
            largest,
        ]
    )


def agreement_of(difference: torch.Tensor, allowed: LogRange) -> Agreement:
    """Of ``[T]`` differences whose ratios are clipped token by token."""
    values = sums_of(difference, difference, allowed).tolist()
    return Agreement(**dict(zip(Agreement.__dataclass_fields__, values, strict=True)))


class OldLogProbs:
    """Compares off-policy rollouts with the policy, slice by slice of a step that begins on the weights of their
    generation; what it takes is at hand there.

    Args:
        trainer: with :class:`~harts_hf.trainers.off_policy.TreeOffPolicy`, or another, of which nothing is compared.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._sums: dict[int, torch.Tensor] = {}
        self._has_warned = False

    def begin(self) -> None:
        """At the first slice of a step."""
        self._sums = {}

    def is_first(self) -> bool:
        """Whether a batch that is handed out now was generated since the latest optimizer step, and is off-policy."""
        return getattr(self._trainer, "_recorded_at_step", None) == self._trainer.state.global_step

    @torch.no_grad()
    def note(self, one: TRLSlice, leaves: Leaves) -> None:
        """What the loss of a slice sees; the last time counts."""
        if one.is_first_of_recorded:
            batch, allowed = one.batch, self._range()
            mask, difference = trained(batch).bool(), leaves[LOG_PROB].detach() - batch["old_per_token_logps"]
            ratios = difference
            if getattr(self._trainer, "importance_sampling_level", "token") == "sequence":
                counts = mask.sum(-1, keepdim=True).clamp(min=1)
                ratios = ((difference * mask).sum(-1, keepdim=True) / counts).expand_as(difference)
            sampled = batch.get("sampling_per_token_logps")  # what is unknown there was scored by the policy itself
            known = mask if sampled is None else mask & ~sampled.isnan()
            self._sums[one.number] = sums_of(difference[known], ratios[known], allowed or UNCLIPPED)

    def sums(self) -> tuple[dict[str, float], dict[str, float]]:
        """Of this process's slices, by the fields of :class:`Agreement`: what is to be added up over processes, and
        what the largest is taken of; empty where no slice was compared."""
        if not self._sums:
            return {}, {}
        values = torch.stack(list(self._sums.values()))
        fields = [*values[:, :-1].sum(dim=0).tolist(), float(values[:, -1].max())]
        named = dict(zip(Agreement.__dataclass_fields__, fields, strict=True))
        return named, {"largest": named.pop("largest")}

    def metrics(self, agreement: Agreement) -> dict[str, float]:
        """Of all processes; warns once where much is clipped."""
        found = {"old_logp_meandiff": agreement.mean_absolute, "old_logp_maxdiff": agreement.largest}
        if self._range() is not None:
            found["old_logp_clipped"] = agreement.clipped
            if agreement.clipped > MOST_CLIPPED and not self._has_warned and self._trainer.is_world_process_zero():
                self._has_warned = True
                _logger.warning(
                    "%.1f%% of the trained tokens are clipped before any weight has moved: their recorded log-probs "
                    "differ from the policy's own %s. RecordedRollouts(logprobs='rescored') compares with the "
                    "policy's own instead (tree/old_logp_clipped; docs/metrics.md)",
                    100 * agreement.clipped, agreement.cause(None),
                )  # fmt: skip
        return found

    def _range(self) -> LogRange | None:
        """What the trainer's loss does not clip; None where it clips nothing."""
        trainer = self._trainer
        if getattr(trainer, "_clips_log_ratios", False):
            return LogRange(-trainer.epsilon_low, trainer.epsilon_high)
        kind = getattr(trainer, "loss_type", None)
        if kind == "cispo":
            return LogRange(-math.inf, math.log(trainer.epsilon_high))
        return None if kind in ("sapo", "vespo") else LogRange.of(trainer.epsilon_low, trainer.epsilon_high)
