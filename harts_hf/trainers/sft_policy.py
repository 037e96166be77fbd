"""The model of a supervised tree trainer: what TRL's loss sees of it, and how an optimizer step runs it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from trl.trainer.utils import FusedCausalLMOutput

from harts_hf.modeling import ENTROPY, HEAD_VALUES, IS_TOP1, LOG_PROB
from harts_hf.runtime.update import Leaves, UpdateReport
from harts_hf.trainers.policy import TreePolicy, TRLSlice
from harts_hf.trainers.settings import SettingsOfSlices
from harts_hf.trainers.texts import LabelledRows

# Of a row: its loss counts so many times.
WEIGHT = "weight"


class TreeTexts(TreePolicy):
    """What a supervised tree trainer has besides TRL's.

    Args:
        trainer: an ``SFTTrainer`` whose model is patched.
    """

    def step(self, model: nn.Module, num_items: Any) -> UpdateReport:
        """Runs the kept slices as one update, with TRL's own loss."""
        slices, self.slices = self.slices, []
        with self.ranks.together():
            self._settings = SettingsOfSlices(self.trainer, [one.settings for one in slices])
        depends_on_values = self.trainer.args.loss_type != "nll"
        try:
            return self._update(model, self.trainer.args.device).run(
                slices,
                lambda one: LabelledRows.from_batch(one.batch),
                lambda one, leaves: self._loss_of_texts(model, one, leaves, num_items),
                names=HEAD_VALUES,
                unscored="never" if depends_on_values else "always",
                reason=f"loss_type_{self.trainer.args.loss_type}",
                probing=self._without_metrics,
            )
        finally:
            self._settings.restore()

    def answer(self, model: nn.Module, batch: dict[str, Any]) -> FusedCausalLMOutput:
        """What TRL's loss asks its model for: ``[B, T - 1]`` of each label, leaves inside a step's loss."""
        rows = LabelledRows.from_batch(batch)
        leaves: Any = self._leaves
        if leaves is None:
            if torch.is_grad_enabled():
                raise ValueError("expected losses outside an optimizer step under torch.no_grad(), got one with")
            leaves = self._update(model, batch["input_ids"].device).score(rows, HEAD_VALUES)
        log_probs = leaves[LOG_PROB]
        weights = batch.get(WEIGHT)
        if weights is not None:
            log_probs = log_probs * weights.to(log_probs)[:, None]
        return FusedCausalLMOutput(
            log_probs=log_probs,
            entropy=leaves[ENTROPY].detach(),
            is_top1=leaves[IS_TOP1] > 0,
            label_mask=rows.label_mask.to(log_probs.device),
        )

    def _loss_of_texts(self, model: nn.Module, one: TRLSlice, leaves: Leaves, num_items: Any) -> torch.Tensor:
        assert self._settings is not None
        self._settings.apply(one.number)
        trainer = self.trainer
        self._leaves = leaves  # type: ignore[assignment]
        try:
            with trainer.compute_loss_context_manager():
                loss: Any = trainer.compute_loss(model, dict(one.batch), num_items_in_batch=num_items)
        finally:
            self._leaves = None
        # As Trainer divides: not what is a mean over the labels of all micro-steps already.
        is_scaled = trainer.model_accepts_loss_kwargs and num_items is not None
        return loss if is_scaled else loss / trainer.current_gradient_accumulation_steps

    @contextmanager
    def _without_metrics(self) -> Iterator[None]:
        """Drops what TRL's loss logs and counts."""
        counted = self.trainer._total_train_tokens
        try:
            with super()._without_metrics():
                yield
        finally:
            self.trainer._total_train_tokens = counted
