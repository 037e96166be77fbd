"""The policy of a tree trainer: what TRL's losses see of it, and how an optimizer step runs it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from harts_hf.modeling import ENTROPY, LABEL_VALUES, LOG_PROB, is_patched
from harts_hf.runtime import TreeUpdate, UpdateReport
from harts_hf.runtime.job import Leaves
from harts_hf.runtime.kept import KeptScores
from harts_hf.trainers.expert_load import ExpertLoad
from harts_hf.trainers.fitting import FittingUpdate, TreeBudgets
from harts_hf.trainers.gathering import gathering_alone, unmeasured
from harts_hf.trainers.micro_steps import SliceLeaves, TRLSlice, active_adapters, on_cpu
from harts_hf.trainers.old_logprobs import OldLogProbs
from harts_hf.trainers.planning import planner_of, run_options_of
from harts_hf.trainers.positions import PositionsHint
from harts_hf.trainers.ranks import AccelerateRanks
from harts_hf.trainers.router_loss import RouterLoss
from harts_hf.trainers.routing_replay import RoutingReplay
from harts_hf.trainers.rows import PROMPTS, PaddedRows, token_ids, without_prompts
from harts_hf.trainers.scored_once import RecordedReference, ScoredOnce, Weights
from harts_hf.trainers.settings import SettingsOfSlices, read_settings
from harts_hf.trainers.skipping import has_custom_loss, reason_to_score
from harts_hf.trainers.slicing import MOST_ON_CPU, SlicingHint
from harts_hf.trainers.weighing import WEIGHTS, StepTotals, check_keys


class TreePolicy:
    """What a tree trainer has besides TRL's: limits of plans, the slices of the running step, its loss's leaves.

    Args:
        trainer: a TRL trainer whose model is patched.

    Attributes:
        planner: plans windows by the trainer's settings, within the default limits where those are "auto".
        budgets: the limits that hold.
        router_loss: the auxiliary loss of a mixture of experts.
        expert_load: how much its experts have to do.
        routing: the routes that its steps replay.
        old_log_probs: compares recorded ones with the policy's own.
        options: how forwards run.
        hint: says where a step has many small slices.
        positions: says where a row is longer than what the model was made for.
        slices: of the optimizer step so far.
        totals: during a step with episodes, what its slices hold together; else None.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.planner = planner_of(trainer, trainer.model)
        self.ranks = AccelerateRanks(
            trainer.accelerator,
            sharded_by_transformers=getattr(trainer, "is_distributed_loading_by_transformers", False),
        )
        self.budgets = TreeBudgets(trainer, self.ranks)
        self.router_loss = RouterLoss(trainer, self.ranks)
        self.expert_load = ExpertLoad(trainer.model)
        self.options = run_options_of(trainer)
        self.scored_once, self.reference = ScoredOnce(trainer), RecordedReference(trainer)
        self.routing = RoutingReplay(trainer, self.active_adapters)
        self.old_log_probs = OldLogProbs(trainer)
        self.hint, self.positions = SlicingHint(trainer), PositionsHint(trainer)
        self.slices: list[TRLSlice] = []
        self.totals: StepTotals | None = None
        self.scaled_loss: torch.Tensor | None = None  # what TreeEpisodes made of TRL's latest loss
        self._leaves: SliceLeaves | None = None
        self._settings: SettingsOfSlices | None = None
        # Models without Accelerate's wrappers: to find one takes milliseconds.
        self._inner: WeakKeyDictionary[nn.Module, ref[nn.Module]] = WeakKeyDictionary()
        # Of the running step: its slices, and whether their loss is a user's own.
        self._num_slices = 0
        self._is_custom = False

    @property
    def counts_all_tokens(self) -> bool:
        """Whether a step computes tokens that no log-prob is asked of, since routers' statistics count them."""
        return self.router_loss.is_on or self.trainer.args.tree_expert_bias_update_speed != 0

    @property
    def is_in_loss(self) -> bool:
        """Whether the loss of a slice is being computed."""
        return self._leaves is not None

    def active_adapters(self) -> Any:
        """Of the policy; see :func:`harts_hf.trainers.micro_steps.active_adapters`."""
        return active_adapters(self._unwrapped(self.trainer.model))

    def add_slice(self, batch: dict[str, Any]) -> None:
        """Keeps the batch of a micro-step until the optimizer step's last one."""
        first = self.old_log_probs.is_first()
        self.slices.append(
            TRLSlice(
                batch=batch,
                number=len(self.slices),
                settings=read_settings(self.trainer),
                is_first_of_recorded=first,
            )
        )

    def log_probs(
        self,
        model: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        num_scored: int,
        *,
        entropy: bool,
        aux_loss: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """What TRL's hook answers: ``[B, num_scored]`` log-probs and entropies, 0 where nothing is scored, and the
        router's auxiliary loss.

        Inside the loss of a slice it hands out the slice's leaves; elsewhere it scores the rows as a tree of their
        own.

        Raises:
            ValueError: an unpatched model, an auxiliary loss where the trainer has none, or a call that would need
                gradients of anything but the policy's log-probs of the slice.
        """
        if aux_loss and not self.router_loss.is_on:
            raise ValueError(f"expected no call for an auxiliary loss of the router in {type(self.trainer).__name__}")
        asked, policy = self._unwrapped(model), self._unwrapped(self.trainer.model)
        leaves = self._leaves
        if leaves is not None and asked is policy and leaves.answers(policy, input_ids, num_scored):
            # TRL compares entropies with a float32 quantile.
            return leaves.log_probs, leaves.entropies.float(), leaves.aux_loss if aux_loss else None
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in asked.parameters()):
            raise ValueError(
                "expected gradients to be asked for the policy's log-probs of a step's own rows only, got "
                + ("another model" if asked is not policy else "other rows" if leaves else "a call outside a step")
                + ": score under torch.no_grad()"
            )
        if not is_patched(asked):
            raise ValueError("expected a model that runs on trees, got an unpatched one: call harts_hf.patch on it")
        rows = PaddedRows.from_tensors(input_ids, attention_mask, num_scored, keeps_all=aux_loss)
        is_policy = asked is policy
        of_reference = self.reference.is_asked(asked, entropy=entropy)
        if of_reference:
            found = self.reference.of(asked, rows)
            (unknown,) = self.ranks.agree(int(found is None))
            if found is not None and not unknown:
                return found.to(input_ids.device), None, None
        rows = rows.with_routes(self.routing.given_to(len(input_ids), is_policy=is_policy))
        weights = self.weights_to_keep(asked) if is_policy and not aux_loss else None
        # A step that finds these again asks for entropies, too.
        labels = LABEL_VALUES if entropy or weights is not None else (LOG_PROB,)
        names = (*labels, *(self.router_loss.names if aux_loss else ()))
        keeps = self.routing.keeps_scored(is_policy=is_policy)
        kept = (lambda rows, routes: self.routing.keep_scored(input_ids, rows, routes)) if keeps else None
        values, scores = self._update(model, input_ids.device, on_scored=kept).scored(rows, names)
        if weights is not None:
            self.scored_once.keep(weights, scores)
        if of_reference:
            self.reference.keep(scores)
        router_loss = self.router_loss.of_batch(values) if aux_loss else None
        return values[LOG_PROB], values[ENTROPY].float() if entropy else None, router_loss

    def weights_to_keep(self, model: nn.Module) -> Weights | None:
        """Those of a pass that a step may find again; None where the step has to run it itself, for the routes that
        later forwards take or for sums over its own trajectories, or where no step will ask.

        Args:
            model: without a wrapper.
        """
        needs_pass = self.router_loss.is_on or self.routing.mode != "off"
        return None if needs_pass else self.scored_once.weights(model)

    def step(self, model: nn.Module, num_items: Any) -> UpdateReport:
        """Runs the kept slices as one update: what their settings were, where their losses run, then :meth:`_run`.

        Args:
            model: as the trainer calls it.
            num_items: what Trainer counts the loss's items by, or None.

        Raises:
            ValueError: slices that cannot be computed together; whatever :meth:`TreeUpdate.run` raises.
        """
        slices, self.slices = self.slices, []
        self.old_log_probs.begin()
        with self.ranks.together():
            check_keys([one.batch for one in slices])
            self._settings = SettingsOfSlices(self.trainer, [one.settings for one in slices])
        self._is_custom = has_custom_loss(self.trainer)
        self.hint.note([one.batch for one in slices])
        self.positions.note([one.batch for one in slices])
        loss_device = self._loss_device(slices)
        if loss_device is not None:
            num_items = num_items.cpu() if isinstance(num_items, torch.Tensor) else num_items
            slices = [replace(one, batch=batch) for one, batch in zip(slices, on_cpu(slices), strict=True)]
        self._num_slices = len(slices)
        try:
            return self._run(model, slices, num_items, loss_device)
        finally:
            self._settings.restore()
            self.totals = self.scaled_loss = None

    def _run(self, model: nn.Module, slices: list[TRLSlice], num_items: Any, loss_device: str | None) -> UpdateReport:
        """The update of a step, with TRL's own loss; what a kind of training does in its own way."""
        self.totals = self._totals([one.batch for one in slices])
        reasons = [self._reason_to_score(one) for one in slices]
        reason = next((found for found in reasons if found is not None), None)
        return self._update(model, self.trainer.args.device).run(
            slices,
            lambda one: PaddedRows.from_batch(one.batch, keeps_all=self.counts_all_tokens).with_routes_of(one.batch),
            lambda one, leaves: self._loss(model, one, leaves, num_items, is_last=one is slices[-1]),
            names=(*LABEL_VALUES, *self.router_loss.names),
            unscored="probe" if reason is None else "never",
            reason=reason or "",
            probing=self._without_metrics,
            loss_device=loss_device,
            kept=self._kept(model, loss_device),
        )

    def _kept(self, model: nn.Module, loss_device: str | None) -> list[KeptScores]:
        return self.scored_once.take(self._unwrapped(model), loss_device or self.trainer.args.device)

    def leaves(self, model: nn.Module, batch: dict[str, Any]) -> SliceLeaves:
        """Those of the slice whose loss is being computed; elsewhere (evaluation) the scores of a batch."""
        if self._leaves is not None:
            return self._leaves
        rows = PaddedRows.from_batch(batch, keeps_all=self.router_loss.is_on).with_routes_of(batch)
        names = (*LABEL_VALUES, *self.router_loss.names)
        values = self._update(model, batch["completion_ids"].device).score(rows, names)
        return self._slice_leaves(batch, values, self.router_loss.of_batch(values))

    @contextmanager
    def handing_out(self, leaves: SliceLeaves, log_probs: torch.Tensor, entropies: torch.Tensor) -> Iterator[None]:
        """Inside, TRL's loss of the same rows sees these ``[B, C]`` values instead, and an auxiliary loss of the same
        value that nothing is differentiated by."""
        before = self._leaves
        self._leaves = replace(
            leaves,
            log_probs=log_probs,
            entropies=entropies,
            aux_loss=None if leaves.aux_loss is None else leaves.aux_loss.detach(),
            with_grad=torch.is_grad_enabled(),
        )
        try:
            yield
        finally:
            self._leaves = before

    def _totals(self, batches: list[dict[str, Any]]) -> StepTotals | None:
        return StepTotals.of(batches, self.ranks) if any(WEIGHTS in batch for batch in batches) else None

    def _slice_leaves(self, batch: dict[str, Any], values: Leaves, aux_loss: torch.Tensor | None) -> SliceLeaves:
        return SliceLeaves(
            log_probs=values[LOG_PROB],
            entropies=values[ENTROPY],
            rows=token_ids(batch),
            aux_loss=aux_loss,
            with_grad=torch.is_grad_enabled(),
            adapters=self.active_adapters(),
        )

    def _unwrapped(self, model: Any) -> Any:
        """The model inside Accelerate's wrappers."""
        known = self._inner.get(model)
        found = None if known is None else known()
        if found is None:
            found = self.trainer.accelerator.unwrap_model(model)
            self._inner[model] = ref(found)
        return found

    def _loss_batch(self, one: TRLSlice) -> dict[str, Any]:
        """What the loss of a slice is given; TRL's own losses read nothing of prompts but which rows they ask for."""
        return one.batch if self._is_custom else without_prompts(one.batch)

    def _update(self, model: nn.Module, device: Any, *, on_scored: Any = None) -> TreeUpdate:
        is_policy = self._unwrapped(model) is self._unwrapped(self.trainer.model)
        return FittingUpdate(
            model,
            self.budgets.applied(self.planner),
            self.options,
            budgets=self.budgets,
            trainer=self.trainer,
            ranks=self.ranks,
            device=device,
            placement=self.trainer.args.tree_placement,
            observed=self.expert_load.observed if is_policy else (),
            known_routes=self.routing.known if is_policy else None,
            on_scored=on_scored,
        )

    def _loss_device(self, slices: list[TRLSlice]) -> str | None:
        """The CPU for TRL's own losses and batches of a size that a CPU is quick at: on a GPU a loss is a hundred
        launches, and a wait for each metric. None elsewhere."""
        if self._is_custom:
            return None
        entries = (
            value.numel()
            for one in slices
            for name, value in one.batch.items()
            if isinstance(value, torch.Tensor) and name not in PROMPTS
        )
        return "cpu" if max(entries) <= MOST_ON_CPU else None

    def _reason_to_score(self, one: TRLSlice) -> str | None:
        assert self._settings is not None
        self._settings.apply(one.number)
        return reason_to_score(self.trainer, one.batch)

    def _loss(self, model: nn.Module, one: TRLSlice, leaves: Leaves, num_items: Any, *, is_last: bool) -> torch.Tensor:
        """TRL's own loss of a slice, scaled for accumulation."""
        assert self._settings is not None
        self._settings.apply(one.number)
        trainer = self.trainer
        aux_loss = self.router_loss.of_slice(leaves, one.number, self._num_slices)
        batch = self._loss_batch(one)
        self.old_log_probs.note(one, leaves)
        self._leaves = self._slice_leaves(batch, leaves, aux_loss)
        try:
            with (
                self.ranks.marked(is_last),
                gathering_alone(trainer.accelerator),
                trainer.compute_loss_context_manager(),
            ):
                loss: Any = trainer.compute_loss(model, batch, num_items_in_batch=num_items)
            if self.totals is not None and not self.totals.even and loss is not self.scaled_loss:
                raise ValueError(
                    "expected compute_loss to return what the tree trainer's does where episodes have different "
                    "numbers of samples or weights, got another loss: its own terms would be neither scaled nor "
                    "weighted (override _compute_loss instead)"
                )
        finally:
            self._leaves = None
        return loss if trainer.loss_is_scaled_for_ga else loss / trainer.current_gradient_accumulation_steps

    @contextmanager
    def _without_metrics(self) -> Iterator[None]:
        """Drops what TRL's loss logs, and spares the other ranks its collectives: all that they serve is logged."""
        metrics = self.trainer._metrics["train"]
        kept = {name: list(values) for name, values in metrics.items()}
        try:
            with unmeasured(self.trainer.accelerator):
                yield
        finally:
            metrics.clear()
            metrics.update(kept)
