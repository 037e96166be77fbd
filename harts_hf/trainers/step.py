"""The training step below TRL's trainer: collects the slices of an optimizer step, then runs them as one window."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.utils.memory import clear_device_cache
from numpy.typing import NDArray
from torch import nn
from trl.trainer.base_trainer import _BaseTrainer

from harts_hf.runtime import Coefficients, HeadOptions, Scores, TreeWindow, WindowRun
from harts_hf.trainers.collator import TreeDataCollator
from harts_hf.trainers.ranks import agreed_count, backward_function, scoring_model, sync_context
from harts_hf.trainers.rows import PaddedRows, collect, plan_rows, spread
from harts_hf.trainers.skipping import check_reach, placeholders, reason_to_score

Slices = list[dict[str, Any]]
Indices = list[NDArray[np.int64]]


@dataclass(frozen=True, eq=False, kw_only=True)
class SliceLeaves:
    """What TRL's hook answers inside the loss of one slice.

    Attributes:
        log_probs: ``[B, C]``.
        entropies: ``[B, C]``.
        rows: ``[B, P + C]`` token ids that they belong to.
        with_grad: whether the loss is computed to be differentiated.
        adapters: which adapters of the policy were active; see :func:`active_adapters`.
    """

    log_probs: torch.Tensor
    entropies: torch.Tensor
    rows: torch.Tensor
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
    return tuple(policy.active_adapters), tuple(parameter.requires_grad for parameter in policy.parameters())


class TreeStep(_BaseTrainer):
    """Replaces ``Trainer.training_step``; stands *below* TRL's trainer in the MRO, whose own step calls it.

    Micro-steps before the last one only keep their slice. The last one plans all slices together, scores them
    (``S``), asks TRL's own loss for its derivatives by every log-prob and entropy, sums those over the trajectories
    that share a token, and runs the planned forwards and backwards (``F B``). Where the derivatives do not depend on
    log-probs, the scoring pass is left out (see :mod:`harts_hf.trainers.skipping`).
    """

    # What TreeHooks and TRL's trainer set.
    args: Any
    _tree_collator: TreeDataCollator
    _tree_head: HeadOptions
    _tree_slices: list[dict[str, Any]]
    _tree_leaves: SliceLeaves | None
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
        prevented = reason_to_score(self, slices) if self.accelerator.num_processes == 1 else "several_processes"
        collator = self._tree_collator.for_execution(self.args.tree_execution, can_skip_scoring=prevented is None)
        window, indices = plan_rows([_padded_rows(one) for one in slices], collator)
        self._log_tree("limits_raised", window.schedule.config != collator.planner)
        window.to(self.args.device)
        self._log_tree("planning_seconds", time.perf_counter() - started)
        coefficients = None
        if prevented is None and window.schedule.execution == "nested" and len(window.batches) > 1:
            coefficients = self._coefficients_of_placeholders(model, window, slices, indices, num_items)
            prevented = None if coefficients is not None else "loss_of_log_probs"
        self._log_tree("scoring_skipped", coefficients is not None)
        if prevented is not None:
            self._log_tree(f"scoring_needed_by/{prevented}", 1)
        if coefficients is None:
            loss, difference = self._with_scoring(model, window, slices, indices, num_items)
        else:
            loss, difference = self._without_scoring(model, window, slices, indices, num_items, coefficients), 0.0
        self._log_window(window, difference)
        return loss

    def _with_scoring(
        self, model: nn.Module, window: TreeWindow, slices: Slices, indices: Indices, num_items: Any
    ) -> tuple[torch.Tensor, float]:
        started = time.perf_counter()
        run = self._tree_run(model, window)
        scores = run.score(return_entropy=True)
        self._log_tree("scoring_seconds", time.perf_counter() - started)
        loss, coefficients = self._loss_coefficients(model, slices, indices, scores, num_items)
        started = time.perf_counter()
        run.backward(coefficients, backward_function(self.accelerator))
        self._log_tree("backward_seconds", time.perf_counter() - started)
        return loss, run.recompute_difference

    def _without_scoring(
        self,
        model: nn.Module,
        window: TreeWindow,
        slices: Slices,
        indices: Indices,
        num_items: Any,
        coefficients: Coefficients,
    ) -> torch.Tensor:
        """The schedule with coefficients that are known before, then TRL's loss on the true values."""
        started = time.perf_counter()
        wanted = np.zeros(window.tree.num_tokens, bool)
        for index in indices:
            wanted[index[index >= 0]] = True
        scores = self._tree_run(model, window, mode="unscored").backward_unscored(
            coefficients, backward_function(self.accelerator), torch.from_numpy(wanted).to(self.args.device)
        )
        with torch.no_grad():
            loss = self._loss(model, slices, [self._leaves(scores, index) for index in indices], num_items)
        self._log_tree("scoring_seconds", 0.0)
        self._log_tree("backward_seconds", time.perf_counter() - started)
        return torch.stack(loss).sum()

    def _coefficients_of_placeholders(
        self, model: nn.Module, window: TreeWindow, slices: Slices, indices: Indices, num_items: Any
    ) -> Coefficients | None:
        """The coefficients by log-probs if they are the same at all placeholders and none is by an entropy."""
        kept = {name: list(values) for name, values in self._metrics["train"].items()}
        found: list[Coefficients] = []
        for log_probs, entropy in placeholders(window.tree.num_tokens, self.args.device):
            scores = Scores(log_probs=log_probs, entropy=entropy)
            found.append(self._loss_coefficients(model, slices, indices, scores, num_items)[1])
        self._metrics["train"].clear()
        self._metrics["train"].update(kept)
        first, *others = found
        known = all(torch.equal(first.log_probs, other.log_probs) for other in others)
        if not known or any(one.entropy is not None and one.entropy.any() for one in found):
            return None
        return Coefficients(log_probs=first.log_probs)

    def _tree_run(self, model: nn.Module, window: TreeWindow, mode: Any = "train") -> WindowRun:
        return WindowRun(
            model,
            window,
            self._tree_head,
            context=self.compute_loss_context_manager,
            offload=self.args.tree_offload_handoff,
            expand_latents=self.args.tree_handoff_latents == "expanded",
            deterministic=self.args.tree_deterministic,
            scoring_model=scoring_model(self.accelerator, model),
            count=agreed_count(self.accelerator, len(window.batches)),
            sync_context=sync_context(self.accelerator, model),
            mode=mode,
        )

    def _loss_coefficients(
        self, model: nn.Module, slices: Slices, indices: Indices, scores: Scores, num_items: Any
    ) -> tuple[torch.Tensor, Coefficients]:
        """TRL's loss of every slice on leaf log-probs, and its derivatives per row of the tree."""
        leaves = [tuple(leaf.requires_grad_() for leaf in self._leaves(scores, index)) for index in indices]
        losses = self._loss(model, slices, leaves, num_items)
        for loss, pair in zip(losses, leaves, strict=True):
            check_reach(loss, pair)
        gradients = [
            torch.autograd.grad(loss, pair, allow_unused=True) for loss, pair in zip(losses, leaves, strict=True)
        ]
        by_log_prob, by_entropy = (
            collect(column, indices, len(scores.log_probs)).to(self.args.device)
            for column in zip(*gradients, strict=True)
        )
        total = torch.stack([loss.detach() for loss in losses]).sum()
        return total, Coefficients(log_probs=by_log_prob, entropy=by_entropy)

    @staticmethod
    def _leaves(scores: Scores, index: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        assert scores.entropy is not None
        return spread(scores.log_probs, index), spread(scores.entropy, index)

    def _loss(self, model: nn.Module, slices: Slices, leaves: Sequence[Any], num_items: Any) -> list[torch.Tensor]:
        """TRL's own loss of every slice, scaled for accumulation."""
        losses = []
        adapters = active_adapters(self.accelerator.unwrap_model(self.model))
        for number, (one, pair) in enumerate(zip(slices, leaves, strict=True)):
            # TRL's adaptive entropy controller acts on the slice that synchronises.
            self.accelerator.gradient_state._set_sync_gradients(number == len(slices) - 1)
            log_probs, entropies = pair
            self._tree_leaves = SliceLeaves(
                log_probs=log_probs,
                entropies=entropies,
                rows=_token_ids(one),
                with_grad=torch.is_grad_enabled(),
                adapters=adapters,
            )
            try:
                with self.compute_loss_context_manager():
                    loss: Any = self.compute_loss(model, one, num_items_in_batch=num_items)
            finally:
                self._tree_leaves = None
                self.accelerator.gradient_state._set_sync_gradients(True)
            losses.append(loss if self.loss_is_scaled_for_ga else loss / self.current_gradient_accumulation_steps)
        return losses

    def _log_window(self, window: TreeWindow, difference: float) -> None:
        schedule = window.schedule
        # What was reached, not what the tokens would allow: a feature that does nothing has to show.
        self._log_tree("sharing_ratio", window.rollout_tree.num_expanded_tokens / schedule.backward_tokens)
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


def _token_ids(one: dict[str, Any]) -> torch.Tensor:
    return torch.cat([one["prompt_ids"], one["completion_ids"]], dim=1)


def _padded_rows(one: dict[str, Any]) -> PaddedRows:
    return PaddedRows.from_tensors(
        _token_ids(one),
        torch.cat([one["prompt_mask"], one["completion_mask"]], dim=1),
        one["completion_ids"].shape[1],
    )
