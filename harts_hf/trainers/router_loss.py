"""The router's auxiliary loss in TRL's losses: its value for a slice, from sums over the step's trajectories.

TRL adds ``router_aux_loss_coef`` times Transformers' load-balancing loss of a micro-step's rows (prompts included,
padding not). With ``tree_aux_scope="slice"`` a slice's value is that one, to the last term. With ``"global"``,
fractions and probabilities are pooled over all slices of the optimizer step and all processes before they are
multiplied, and each slice gets that one value: TRL's coefficient is then applied to it once.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch

from harts_hf.modeling import ROUTER_CHOICES, ROUTER_PROBABILITIES, ROUTER_SUMS, load_balancing_loss
from harts_hf.modeling.patching import causal_lm_of
from harts_hf.runtime import Ranks

# Whether a trainer's loss has the router's: computed; absent from it as from TRL's; or not known how.
Support = Literal["computed", "absent", "refused"]
SCOPES = ("slice", "global")


class RouterLoss:
    """The auxiliary loss of a trainer's policy.

    Args:
        trainer: whose model is patched.
        ranks: its processes.
    """

    def __init__(self, trainer: Any, ranks: Ranks) -> None:
        self._trainer, self._ranks = trainer, ranks
        self._top_k: int = getattr(causal_lm_of(trainer.model).config, "num_experts_per_tok", 0)

    @property
    def is_on(self) -> bool:
        """Whether the trainer's loss has it."""
        return has_router_loss(self._trainer)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the sums that it is computed from; none where the loss does not have it."""
        return ROUTER_SUMS if self.is_on else ()

    def of_slice(self, values: Mapping[str, torch.Tensor], number: int, num_slices: int) -> torch.Tensor | None:
        """Of slice ``number`` of ``num_slices`` of this process; None where the loss does not have it.

        Args:
            values: of an update, with the sums ``[K, E]``.
            number: of the micro-step.
            num_slices: micro-steps of the optimizer step.
        """
        if not self.is_on:
            return None
        own = self._ranks.index * num_slices + number
        probabilities, choices = (values[name] for name in (ROUTER_PROBABILITIES, ROUTER_CHOICES))
        if self._trainer.args.tree_aux_scope == "global":
            return self._loss(probabilities.sum(dim=0), choices.sum(dim=0))
        return self._loss(probabilities[own], choices[own])

    def of_batch(self, values: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Of a batch outside of a step (evaluation); with the global scope, of those of all processes together."""
        if not self.is_on:
            return None
        sums = [values[name][0] for name in (ROUTER_PROBABILITIES, ROUTER_CHOICES)]
        if self._trainer.args.tree_aux_scope == "global":
            sums = self._ranks.add_up(sums)
        return self._loss(*sums)

    def term(self, value: torch.Tensor) -> torch.Tensor:
        """What TRL's GRPO loss has of it: weighed, and divided over the micro-steps."""
        trainer = self._trainer
        steps = trainer.current_gradient_accumulation_steps if trainer.model.training else 1.0
        term: torch.Tensor = trainer.router_aux_loss_coef * value / steps
        return term

    def _loss(self, probabilities: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
        return load_balancing_loss(probabilities, choices, self._top_k)


def has_router_loss(trainer: Any) -> bool:
    """Whether the loss of a tree trainer has the router's."""
    return getattr(trainer, "aux_loss_enabled", False) and trainer.router_loss == "computed"
