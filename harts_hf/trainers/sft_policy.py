"""The model of a supervised tree trainer: what TRL's loss sees of it, and how an optimizer step runs it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from trl.trainer.utils import FusedCausalLMOutput

from harts_hf.errors import UnsupportedModelError
from harts_hf.modeling import ENTROPY, HEAD_VALUES, IS_TOP1, LOG_PROB
from harts_hf.runtime import UpdateReport
from harts_hf.runtime.job import Leaves
from harts_hf.trainers.micro_steps import TRLSlice
from harts_hf.trainers.policy import TreePolicy
from harts_hf.trainers.texts import LabelledRows

# Of a row: its loss counts so many times.
WEIGHT = "weight"
# Among a slice's leaves, the router's auxiliary loss.
AUX_LOSS = "aux_loss"


def check_weighted_loss(loss_type: str) -> None:
    """Raises UnsupportedModelError for a loss in which log-probs times a weight are no weighted loss."""
    if loss_type != "nll":
        raise UnsupportedModelError(
            f"expected loss_type='nll' with a column {WEIGHT!r}, got {loss_type!r} (whose own weights are computed "
            "from log-probs)"
        )


class TreeTexts(TreePolicy):
    """What a supervised tree trainer has besides TRL's.

    Args:
        trainer: an ``SFTTrainer`` whose model is patched.
    """

    def _run(self, model: nn.Module, slices: list[TRLSlice], num_items: Any, loss_device: str | None) -> UpdateReport:
        loss_type = self.trainer.args.loss_type
        reason = "" if loss_type == "nll" else f"loss_type_{loss_type}"
        reason = "router_aux_loss" if self.router_loss.is_on else reason
        return self._update(model, self.trainer.args.device).run(
            slices,
            lambda one: LabelledRows.from_batch(one.batch, keeps_all=self.counts_all_tokens),
            lambda one, leaves: self._loss_of_texts(model, one, leaves, num_items),
            names=(*HEAD_VALUES, *self.router_loss.names),
            unscored="never" if reason else "always",
            reason=reason,
            probing=self._without_metrics,
            loss_device=loss_device,
        )

    def _loss_device(self, slices: list[TRLSlice]) -> str | None:
        """TRL's loss of labelled rows is a few operations: where the model is."""
        return None

    def answer(self, model: nn.Module, batch: dict[str, Any]) -> FusedCausalLMOutput:
        """What TRL's loss asks its model for: ``[B, T - 1]`` of each label, leaves inside a step's loss."""
        rows = LabelledRows.from_batch(batch, keeps_all=self.router_loss.is_on)
        leaves: Any = self._leaves
        if leaves is None:
            if torch.is_grad_enabled():
                raise ValueError("expected losses outside an optimizer step under torch.no_grad(), got one with")
            names = (*HEAD_VALUES, *self.router_loss.names)
            values = self._update(model, batch["input_ids"].device).score(rows, names)
            leaves = {**values, AUX_LOSS: self.router_loss.of_batch(values)}
        log_probs = leaves[LOG_PROB]
        weights = batch.get(WEIGHT)
        if weights is not None:
            check_weighted_loss(self.trainer.args.loss_type)  # rows of streams and evaluations, too
            log_probs = log_probs * weights.to(log_probs)[:, None]
        return FusedCausalLMOutput(
            log_probs=log_probs,
            entropy=leaves[ENTROPY].detach(),
            is_top1=leaves[IS_TOP1] > 0,
            label_mask=rows.label_mask.to(log_probs.device),
            aux_loss=leaves[AUX_LOSS],
        )

    def _loss_of_texts(self, model: nn.Module, one: TRLSlice, leaves: Leaves, num_items: Any) -> torch.Tensor:
        assert self._settings is not None
        self._settings.apply(one.number)
        trainer = self.trainer
        if trainer.has_weights and WEIGHT not in one.batch:
            raise ValueError(
                f"expected batches with the data set's column {WEIGHT!r}, got {', '.join(one.batch)}: let the "
                "data_collator hand it on, or remove the column"
            )
        aux_loss = self.router_loss.of_slice(leaves, one.number, self._num_slices)
        self._leaves = {**leaves, AUX_LOSS: aux_loss}  # type: ignore[assignment]
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
