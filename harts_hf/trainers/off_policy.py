"""Off-policy rollouts in a TRL trainer: the policy is compared with the log-probs that came with them.

TRL compares the policy with its own log-probs at generation (``old_per_token_logps``), and keeps those of a rollout
function (``sampling_per_token_logps``) for corrections of vLLM's rounding. Where a rollout function says that its
rollouts are another policy's, theirs are the old ones: the ratio of PPO's objective (Schulman et al., 2017, equation
6) is ``pi / pi_recorded``, clipped like any other.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from harts_hf.trainers.policy import TreePolicy
from harts_hf.trainers.weighing import trained


class TreeOffPolicy:
    """Mixin above :class:`~harts_hf.trainers.episodes.TreeEpisodes`, which reads what a rollout function returns."""

    # What TRL's trainer sets.
    model: Any
    accelerator: Any
    state: Any
    # What TreeEpisodes and TreeHooks set.
    _off_policy: bool
    _has_unknown: bool
    _tree: TreePolicy

    # During a generation, the policy's adapters; see :func:`active_adapters`.
    _adapters_of_policy: Any = None
    _is_generating = False
    # Optimizer steps before the latest generation of a training, if it was off-policy: then no weight has moved since.
    _recorded_at_step: int | None = None

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """TRL's batch; of off-policy rollouts with their log-probs as ``old_per_token_logps`` [B, C]."""
        parent: Any = super()
        self._adapters_of_policy = self._active_adapters()
        self._is_generating = True
        try:
            output: dict[str, Any] = parent._generate_and_score_completions(inputs)
        finally:
            self._is_generating = False
        if self._off_policy:
            output["old_per_token_logps"] = self._recorded(output)
        if self.model.training:
            self._recorded_at_step = self.state.global_step if self._off_policy else None
        return output

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **vision: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
        """TreeHooks'. The policy's own old log-probs, where recorded ones will replace them, are zeros: no forward."""
        parent: Any = super()
        if (
            self._is_generating
            and self._off_policy
            and not self._has_unknown
            and model is self.model
            and self._active_adapters() == self._adapters_of_policy  # not those of a reference model
        ):
            return torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device), None, None
        found: tuple[torch.Tensor, torch.Tensor | None, Any] = parent._get_per_token_logps_and_entropies(
            model,
            input_ids,
            attention_mask,
            logits_to_keep,
            batch_size,
            compute_entropy=compute_entropy,
            compute_aux_loss=compute_aux_loss,
            **vision,
        )
        return found

    def _active_adapters(self) -> Any:
        return self._tree.active_adapters()

    def _recorded(self, output: Mapping[str, Any]) -> torch.Tensor:
        """``[B, C]``, finite everywhere: the policy's own where a trained token's is unknown, 0 where none is trained
        (a ratio there has to be finite, since TRL multiplies it by 0)."""
        recorded: torch.Tensor = output["sampling_per_token_logps"]
        if self._has_unknown:
            own = output.get("old_per_token_logps")
            if own is None:
                with torch.no_grad():
                    own, _, _ = self._get_per_token_logps_and_entropies(
                        self.model,
                        torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1),
                        torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1),
                        output["completion_ids"].shape[1],
                    )
            recorded = torch.where(recorded.isnan(), own.to(recorded.dtype), recorded)
        return torch.where(trained(output).bool(), recorded, 0.0)


def has_unknown(output: Mapping[str, Any]) -> bool:
    """Whether a log-prob of a token with mask 1 is None or NaN, in what a rollout function returned."""
    masks = output.get("env_mask") or [[1] * len(row) for row in output["logprobs"]]
    return any(
        own and (value is None or value != value)
        for row, mask in zip(output["logprobs"], masks, strict=True)
        for value, own in zip(row, mask, strict=True)
    )
