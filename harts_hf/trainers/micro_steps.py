"""The batches of an optimizer step's micro-steps, and what the loss of each of them sees of the policy."""

from dataclasses import dataclass
from typing import Any

import torch

from harts_hf.batch.tables import read_together
from harts_hf.modeling import walking
from harts_hf.trainers.settings import Settings


@dataclass(frozen=True, eq=False, kw_only=True)
class TRLSlice:
    """The batch of one micro-step.

    Attributes:
        batch: TRL's.
        number: of the micro-step within the optimizer step.
        settings: of the trainer then.
        is_first_of_recorded: whether the weights are those that its off-policy rollouts met; see
            :class:`harts_hf.trainers.old_logprobs.OldLogProbs`.
    """

    batch: dict[str, Any]
    number: int
    settings: Settings
    is_first_of_recorded: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class SliceLeaves:
    """What TRL's hook answers inside the loss of one slice.

    Attributes:
        log_probs: ``[B, C]``.
        entropies: ``[B, C]``.
        rows: ``[B, P + C]`` token ids that they belong to.
        aux_loss: of the router; None where the loss has none.
        with_grad: whether the loss is computed to be differentiated.
        adapters: which adapters of the policy were active; see :func:`active_adapters`.
    """

    log_probs: torch.Tensor
    entropies: torch.Tensor
    rows: torch.Tensor
    aux_loss: torch.Tensor | None
    with_grad: bool
    adapters: Any

    def answers(self, policy: Any, input_ids: torch.Tensor, num_scored: int) -> bool:
        """Whether a call asks for these: not where a loss of the user's own scores other rows, or a reference model
        without gradients or adapters."""
        same_rows = input_ids.shape == self.rows.shape and bool(torch.equal(input_ids, self.rows))
        same_policy = torch.is_grad_enabled() == self.with_grad and active_adapters(policy) == self.adapters
        return same_rows and same_policy and num_scored == self.log_probs.shape[1]


def active_adapters(policy: Any) -> Any:
    """Something that differs where other adapters of a PEFT model are active, or none; None for other models."""
    if not hasattr(policy, "peft_config"):
        return None
    return tuple(policy.active_adapters), tuple(parameter.requires_grad for parameter in walking.parameters(policy))


def on_cpu(slices: list[TRLSlice]) -> list[dict[str, Any]]:
    """The batches of slices on the CPU: copied together, and waited for once."""
    tensors = [v for one in slices for v in one.batch.values() if isinstance(v, torch.Tensor)]
    copies = iter(read_together(tensors))
    return [{k: next(copies) if isinstance(v, torch.Tensor) else v for k, v in one.batch.items()} for one in slices]
