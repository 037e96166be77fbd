"""The training step below TRL's trainer: collects the slices of an optimizer step, then runs them as one update."""

import math
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache
from torch import nn
from trl.trainer.base_trainer import _BaseTrainer

from harts_hf.modeling import walking
from harts_hf.trainers.clipping import clip_gradients
from harts_hf.trainers.metrics import tree_metrics
from harts_hf.trainers.policy import TreePolicy
from harts_hf.trainers.prompts import prepared
from harts_hf.trainers.zero_loss import zero_loss


class TreeStep(_BaseTrainer):
    """Replaces ``Trainer.training_step``; stands *below* TRL's trainer in the MRO, whose own step calls it.

    Micro-steps before the last one only keep their slice. The last one runs all slices together: see
    :class:`harts_hf.runtime.update.TreeUpdate`.
    """

    # What TreeHooks and TRL's trainer set.
    args: Any
    model: Any
    _tree: TreePolicy
    _metrics: Any

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Returns the slice's loss, detached; all of it at the last micro-step, as their sum is what is logged."""
        # Goes through all modules, so not at every micro-step. An evaluation leaves the model inside a wrapper of DDP
        # or DeepSpeed in eval mode, and the wrapper as it was. To set what is set takes ten times as long as to look.
        may_have_changed = self.accelerator.sync_gradients or not (model.training and self.model.training)
        if may_have_changed and not all(module.training for module in walking.modules(model)):
            model.train()
        optimizer: Any = self.optimizer
        if callable(getattr(optimizer, "train", None)):  # schedule-free optimizers
            optimizer.train()
        self._tree.add_slice(prepared(self, inputs))
        if not self.accelerator.sync_gradients:
            return zero_loss(self.args.device)
        report = self._tree.step(model, num_items_in_batch)
        metrics = tree_metrics(report, self._tree.ranks, self._tree.routing, self._tree.old_log_probs)
        metrics |= self._tree.expert_load.note(report.sums) | self._tree.budgets.metrics()
        for name, value in metrics.items():
            self._metrics["train"][f"tree/{name}"].append(value)
        empty_cache = self.args.torch_empty_cache_steps
        if empty_cache is not None and self.state.global_step % empty_cache == 0:
            clear_device_cache()
        return report.loss

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        parent: Any = super()
        own = clip_gradients(self, model, self.args.max_grad_norm)
        return parent._clip_grad_norm(model) if own is None else own

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        parent: Any = super()
        own = clip_gradients(self, model, math.inf) if grad_norm is None else None
        return parent._get_grad_norm(model, grad_norm=grad_norm if own is None else own)
