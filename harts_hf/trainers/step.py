"""The training step below TRL's trainer: collects the slices of an optimizer step, then runs them as one window."""

import time
from typing import Any

import numpy as np
import torch
from accelerate.utils.memory import clear_device_cache
from numpy.typing import NDArray
from torch import nn
from trl.trainer.base_trainer import _BaseTrainer

from harts_hf.runtime import HeadOptions, Scores, TreeWindow, run_backward, score
from harts_hf.trainers.collator import TreeDataCollator
from harts_hf.trainers.rows import PaddedRows, collect, plan_rows, spread


class TreeStep(_BaseTrainer):
    """Replaces ``Trainer.training_step``; stands *below* TRL's trainer in the MRO, whose own step calls it.

    Micro-steps before the last one only keep their slice. The last one plans all slices together, scores them
    (``S``), asks TRL's own loss for its derivatives by every log-prob and entropy, sums those over the trajectories
    that share a token, and runs the planned forwards and backwards (``F B``).
    """

    # What TreeHooks and TRL's trainer set.
    _tree_collator: TreeDataCollator
    _tree_head: HeadOptions
    _tree_slices: list[dict[str, Any]]
    _tree_leaves: tuple[torch.Tensor, torch.Tensor] | None
    _metrics: Any

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Returns the slice's loss, detached; all of it at the last micro-step, as their sum is what is logged."""
        model.train()
        optimizer: Any = self.optimizer
        if callable(getattr(optimizer, "train", None)):  # schedule-free optimizers
            optimizer.train()
        self._tree_slices.append(self._prepare_inputs(inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        slices, self._tree_slices = self._tree_slices, []
        loss = self._run_window(model, slices, num_items_in_batch)
        empty_cache = self.args.torch_empty_cache_steps
        if empty_cache is not None and self.state.global_step % empty_cache == 0:
            clear_device_cache()
        return loss

    def _run_window(self, model: nn.Module, slices: list[dict[str, Any]], num_items: Any) -> torch.Tensor:
        started = time.perf_counter()
        rows = [_padded_rows(one) for one in slices]
        window, indices = plan_rows(rows, self._tree_collator)
        window.to(self.args.device)
        planned = time.perf_counter()
        scores = self._tree_score(model, window, return_entropy=True)
        scored = time.perf_counter()
        loss, log_prob_gradients, entropy_gradients = self._loss_gradients(model, slices, indices, scores, num_items)
        begun = time.perf_counter()
        difference = self._tree_backward(model, window, scores, log_prob_gradients, entropy_gradients)
        ended = time.perf_counter()
        self._log_window(window, difference)
        self._log_tree("planning_seconds", planned - started)
        self._log_tree("scoring_seconds", scored - planned)
        self._log_tree("backward_seconds", ended - begun)
        return loss

    def _tree_score(self, model: nn.Module, window: TreeWindow, *, return_entropy: bool) -> Scores:
        return score(
            model, window, self._tree_head, return_entropy=return_entropy, context=self.compute_loss_context_manager
        )

    def _loss_gradients(
        self,
        model: nn.Module,
        slices: list[dict[str, Any]],
        indices: list[NDArray[np.int64]],
        scores: Scores,
        num_items: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """TRL's loss of every slice on leaf log-probs, and its derivatives per row of the tree."""
        assert scores.entropy is not None
        total = torch.zeros((), device=self.args.device)
        gradients: list[tuple[torch.Tensor | None, ...]] = []
        for number, (one, index) in enumerate(zip(slices, indices, strict=True)):
            leaves = [spread(values, index).requires_grad_() for values in (scores.log_probs, scores.entropy)]
            loss = self._slice_loss(model, one, (leaves[0], leaves[1]), num_items, is_last=number == len(slices) - 1)
            gradients.append(torch.autograd.grad(loss, leaves, allow_unused=True))
            total += loss.detach()
        by_log_prob, by_entropy = (
            collect(column, indices, len(scores.log_probs)) for column in zip(*gradients, strict=True)
        )
        return total, by_log_prob, by_entropy

    def _slice_loss(
        self,
        model: nn.Module,
        one: dict[str, Any],
        leaves: tuple[torch.Tensor, torch.Tensor],
        num_items: Any,
        *,
        is_last: bool,
    ) -> torch.Tensor:
        # TRL's adaptive entropy controller acts on the slice that synchronises.
        self.accelerator.gradient_state._set_sync_gradients(is_last)
        self._tree_leaves = leaves
        try:
            with self.compute_loss_context_manager():
                loss: Any = self.compute_loss(model, one, num_items_in_batch=num_items)
        finally:
            self._tree_leaves = None
            self.accelerator.gradient_state._set_sync_gradients(True)
        if not self.loss_is_scaled_for_ga:
            loss = loss / self.current_gradient_accumulation_steps
        return loss

    def _tree_backward(
        self,
        model: nn.Module,
        window: TreeWindow,
        scores: Scores,
        log_prob_gradients: torch.Tensor,
        entropy_gradients: torch.Tensor,
    ) -> float:
        return run_backward(
            model,
            window,
            log_prob_gradients.to(self.args.device),
            entropy_gradients.to(self.args.device),
            self.accelerator.backward,
            self._tree_head,
            context=self.compute_loss_context_manager,
            compare_with=scores,
        )

    def _log_window(self, window: TreeWindow, difference: float) -> None:
        schedule = window.schedule
        self._log_tree("sharing_ratio", window.rollout_tree.sharing_ratio)
        self._log_tree("expanded_tokens", window.rollout_tree.num_expanded_tokens)
        self._log_tree("forward_tokens", schedule.forward_tokens)
        self._log_tree("backward_tokens", schedule.backward_tokens)
        self._log_tree("replay_tokens", schedule.replay_tokens)
        self._log_tree("linear_calls", schedule.linear_calls)
        self._log_tree("microbatches", len(schedule.microbatches))
        self._log_tree("oversized_microbatches", len(schedule.oversized))
        self._log_tree("logp_recompute_maxdiff", difference)

    def _log_tree(self, name: str, value: float) -> None:
        self._metrics["train"][f"tree/{name}"].append(float(value))


def _padded_rows(one: dict[str, Any]) -> PaddedRows:
    return PaddedRows.from_tensors(
        torch.cat([one["prompt_ids"], one["completion_ids"]], dim=1),
        torch.cat([one["prompt_mask"], one["completion_mask"]], dim=1),
        one["completion_ids"].shape[1],
    )
