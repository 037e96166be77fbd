"""Policy and values of a PPO trainer on rollout trees: how rollouts are scored, and how an optimizer step runs."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from harts_hf.errors import HartsWarning
from harts_hf.modeling import ENTROPY, LOG_PROB
from harts_hf.runtime import TreeUpdate, UpdateReport
from harts_hf.runtime.job import Leaves
from harts_hf.runtime.kept import KeptScores
from harts_hf.trainers.micro_steps import TRLSlice
from harts_hf.trainers.planning import planner_of
from harts_hf.trainers.policy import TreePolicy
from harts_hf.trainers.ppo_loss import PolicyTerms, PolicyTokens, Sums, policy_loss, value_loss
from harts_hf.trainers.ppo_rows import IS_TRAINED, ValuedRows
from harts_hf.trainers.rows import PaddedRows
from harts_hf.trainers.value_head import VALUE, add_value_head, head_of

POLICY_VALUES = (LOG_PROB, ENTROPY)
# Entries of a batch, beside TRL's and IS_TRAINED: [B, C] each, and a number.
OLD_LOG_PROBS, REFERENCE, SAMPLER_RATIO = "old_per_token_logps", "ref_per_token_logps", "importance_sampling_ratio"
ADVANTAGES, RETURNS, OLD_VALUES, KL_COEF = "advantages", "returns", "old_values", "kl_coef"
# Trained tokens of a generation batch, of all processes: TRL's entry, but without episodes that have no reward.
NUM_TRAINED = "num_items_in_batch"
# [L] tokens that a process runs if it has no row in a minibatch.
OTHERWISE = "otherwise"


class TreeActorCritic(TreePolicy):
    """What a PPO trainer has besides TRL's: the value head, or a value model, and a minibatch of whole trees.

    Args:
        trainer: whose model is patched; so is its ``value_model``, if there is one.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        in_fp32 = trainer.args.value_head_in_fp32
        self.value_model: nn.Module | None = trainer.value_model
        if self.value_model is None:
            add_value_head(trainer.model, in_fp32=in_fp32)
            return
        add_value_head(self.value_model, in_fp32=in_fp32)
        self._value_planner = planner_of(trainer, self.value_model)
        self.value_model = trainer.accelerator.prepare_model(self.value_model)

    @property
    def head(self) -> Any:
        """The value head, in whichever model it is."""
        return head_of(self._unwrapped(self.trainer.model if self.value_model is None else self.value_model))

    def add_slice(self, batch: dict[str, Any] | None) -> None:
        """Keeps the minibatch of an optimizer step, which its last micro-step has; the others have None."""
        if batch is not None:
            super().add_slice(batch)

    def score(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        num_scored: int,
        batch: dict[str, Any] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs ``[B, C]`` of the policy and values ``[B, C + 1]``, the last that of each row's end.

        Where routing is replayed, the policy takes the experts that are known, or the batch being generated keeps
        those that it took, for every later step on it.

        Args:
            input_ids: ``[B, P + C]``.
            attention_mask: of the same shape.
            num_scored: C.
            batch: of these rows, which may hold routes; None for rows that are not a batch yet.
        """
        rows = PaddedRows.from_tensors(input_ids, attention_mask, num_scored)
        given = self.routing.given_to(len(input_ids), is_policy=True) if batch is None else None
        rows = rows.with_routes(given) if batch is None else rows.with_routes_of(batch)
        valued = ValuedRows(rows=rows, otherwise=rows.stand_in())
        policy = self._unwrapped(self.trainer.model)
        weights = self.weights_to_keep(policy)
        labels = (LOG_PROB,) if weights is None else POLICY_VALUES
        names = labels if self.value_model is not None else (*labels, VALUE)
        keeps = self.routing.keeps_scored(is_policy=True)
        kept = (lambda _, routes: self.routing.keep_scored(input_ids, rows, routes)) if keeps else None
        found, scores = self._update(self.trainer.model, input_ids.device, on_scored=kept).scored(valued, names)
        if weights is not None:
            self.scored_once.keep(weights, scores)
        if self.value_model is not None:
            found |= self._value_update(input_ids.device).score(valued, (VALUE,))
        return found[LOG_PROB], found[VALUE]

    def _run(self, model: nn.Module, slices: list[TRLSlice], num_items: Any, loss_device: str | None) -> UpdateReport:
        trains_policy = self.trainer.state.global_step >= self.trainer.args.value_warmup_steps
        self._sums: Sums = {}
        update = self._update(model, self.trainer.args.device)
        kept = self._kept(model, loss_device)
        if self.value_model is None:
            self.head.is_detached = not trains_policy
            report = self._run_one(update, slices, (*POLICY_VALUES, VALUE), loss_device, kept)
        else:
            report = self._run_value_model(slices, loss_device)
            if trains_policy:
                policy = self._run_one(update, slices, POLICY_VALUES, loss_device, kept)
                report = replace(policy, loss=policy.loss + report.loss)
        if not self._log("train", slices[0].batch):
            self._drop_gradients(model)
        return report

    def _drop_gradients(self, model: nn.Module) -> None:
        """Of a minibatch that trains nothing on any rank: without gradients optimizers leave parameters as they are,
        where zeros would let momentum and weight decay move them."""
        in_engine = self.trainer.is_deepspeed_enabled
        result = "DeepSpeed's optimizer steps all the same, by momentum" if in_engine else "its step changes nothing"
        warnings.warn(
            "a minibatch has no trained token on any process (its episodes have no reward, or none of the policy's "
            f"tokens): {result}; see the metric trained_tokens",
            HartsWarning,
            stacklevel=2,
        )
        if not in_engine:
            for module in (model, *([] if self.value_model is None else [self.value_model])):
                module.zero_grad(set_to_none=True)

    def loss(self, batch: dict[str, Any]) -> torch.Tensor:
        """The loss of a minibatch; its values are the leaves of the running step, or (in evaluation) scored."""
        leaves: Any = self._leaves
        if leaves is not None:
            return self._loss_of(batch, leaves)
        device, rows = batch["completion_ids"].device, self._rows(batch)
        names = POLICY_VALUES if self.value_model is not None else (*POLICY_VALUES, VALUE)
        scored = self._update(self.trainer.model, device).score(rows, names)
        if self.value_model is not None:
            scored |= self._value_update(device).score(rows, (VALUE,))
        self._sums = {}
        loss = self._loss_of(batch, scored)
        self._log("eval", batch)
        return loss

    def _rows(self, batch: dict[str, Any]) -> ValuedRows:
        return ValuedRows.from_batch(batch, otherwise=batch[OTHERWISE].cpu().numpy())

    def _run_one(
        self,
        update: TreeUpdate,
        slices: list[TRLSlice],
        names: tuple[str, ...],
        loss_device: str | None,
        kept: Sequence[KeptScores] = (),
    ) -> UpdateReport:
        return update.run(
            slices,
            lambda one: self._rows(one.batch),
            self._loss_on,
            names=names,
            reason="value_loss" if VALUE in names else "old_per_token_logps",
            loss_device=loss_device,
            kept=kept,
        )

    def _run_value_model(self, slices: list[TRLSlice], loss_device: str | None) -> UpdateReport:
        """Trainer clears and clips the policy's gradients alone."""
        assert self.value_model is not None
        self.value_model.zero_grad()
        self.value_model.train()
        report = self._run_one(self._value_update(self.trainer.args.device), slices, (VALUE,), loss_device)
        if self.trainer.args.max_grad_norm:
            nn.utils.clip_grad_norm_(self.value_model.parameters(), self.trainer.args.max_grad_norm)
        return report

    def _value_update(self, device: Any) -> TreeUpdate:
        assert self.value_model is not None
        update = self._update(self.value_model, device)
        update.planner = self.budgets.applied(self._value_planner)
        return update

    def _loss_on(self, one: TRLSlice, leaves: Leaves) -> torch.Tensor:
        trainer = self.trainer
        self._leaves = leaves  # type: ignore[assignment]
        try:
            with trainer.compute_loss_context_manager():
                loss: torch.Tensor = trainer.compute_loss(trainer.model, one.batch)
        finally:
            self._leaves = None
        return loss

    def _loss_of(self, batch: dict[str, Any], values: Leaves) -> torch.Tensor:
        """The parts of the loss whose values are there, of this rank; backends average over ranks."""
        trainer, trained = self.trainer, batch[IS_TRAINED]
        total: Any = 0.0
        if LOG_PROB in values:
            loss, sums = policy_loss(
                values[LOG_PROB][trained], values[ENTROPY][trained], self._tokens(batch), self._terms(batch)
            )
            # Also where its weight is 0, so that losses depend on the same values on every rank.
            trains_policy = not trainer.model.training or trainer.state.global_step >= trainer.args.value_warmup_steps
            total = total + loss * float(trains_policy)
            self._sums |= sums
        if VALUE in values:
            loss, sums = value_loss(
                values[VALUE][:, :-1][trained],
                batch[RETURNS][trained],
                batch[OLD_VALUES][trained],
                trainer.args.cliprange_value,
            )
            total = total + trainer.args.vf_coef * loss
            self._sums |= sums
        num_tokens = max(float(batch[NUM_TRAINED]), 1.0) / self._num_minibatches
        result: torch.Tensor = total * (self.ranks.count / num_tokens)
        return result

    @property
    def _num_minibatches(self) -> int:
        return self.trainer.args.num_minibatches if self.trainer.model.training else 1

    def _tokens(self, batch: dict[str, Any]) -> PolicyTokens:
        trained = batch[IS_TRAINED]
        reference, weights = batch.get(REFERENCE), batch.get(SAMPLER_RATIO)
        return PolicyTokens(
            advantages=batch[ADVANTAGES][trained],
            old_log_probs=batch[OLD_LOG_PROBS][trained],
            reference=None if reference is None else reference[trained],
            weights=None if weights is None else weights.expand_as(trained)[trained],
        )

    def _terms(self, batch: dict[str, Any]) -> PolicyTerms:
        trainer = self.trainer
        in_loss = trainer.args.kl_in == "loss"
        return PolicyTerms(
            clip_low=trainer.epsilon_low,
            clip_high=trainer.epsilon_high,
            entropy_weight=trainer.entropy_coef,
            kl_weight=float(batch[KL_COEF]) if in_loss else 0.0,
            kl_by_ratio=trainer.args.use_bias_correction_kl,
        )

    def _log(self, mode: str, batch: dict[str, Any]) -> float:
        """Logs means over the trained tokens of all ranks; a collective where there are several.

        Returns:
            How many tokens these are. Where there is none, there is nothing to log but that.
        """
        sums = {name: float(value) for name, value in self._sums.items()}
        sums["tokens"] = float(batch[IS_TRAINED].sum())
        total, _ = self.ranks.totals(sums, {})
        count = total.pop("tokens")
        log = self.trainer._metrics[mode]
        log["trained_tokens"].append(count)
        names = {"clip_ratio": "clip_ratio/region_mean", "value_clip_ratio": "clip_ratio/value_mean"}
        for name, value in total.items() if count else ():
            log[names.get(name, name)].append(value / count)
        return count
