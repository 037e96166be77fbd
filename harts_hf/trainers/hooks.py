"""The hooks above TRL's trainer: where its losses see the policy, and what is refused before it trains."""

from typing import Any

import torch
from torch import nn

from harts_hf.modeling import patch
from harts_hf.modeling.checkpointing import allow_some_layers, old_names
from harts_hf.modeling.checks import check_trainable
from harts_hf.modeling.patching import causal_lm_of
from harts_hf.names import check_model_name
from harts_hf.trainers.acceleration import check_uncompiled
from harts_hf.trainers.experimental import own_collectors
from harts_hf.trainers.expert_load import ExpertBiasUpdate, ExpertLoadFiles, send_bias_to_engines
from harts_hf.trainers.loading import load_tokenizer, loading_text_models
from harts_hf.trainers.model_card import TreeModelCard
from harts_hf.trainers.policy import TreePolicy
from harts_hf.trainers.precision import keep_answers_wide
from harts_hf.trainers.present_names import PresentNames
from harts_hf.trainers.prompts import UnreadPrompts
from harts_hf.trainers.refusals import (
    check_offload,
    check_prompts,
    check_reference,
    check_settings,
    check_trl_version,
)
from harts_hf.trainers.resuming import TreeCheckpoints
from harts_hf.trainers.router_loss import Support
from harts_hf.trainers.routing_replay import TreeRoutingReplay
from harts_hf.trainers.sampling import check_sampling
from harts_hf.trainers.zero3 import gather_whole_layers, name_accelerator, show_processes

# TRL's positional arguments before processing_class: a model, its arguments, another, two data sets.
_BEFORE_PROCESSING_CLASS = 5


class TreeHooks(TreeModelCard, PresentNames, TreeRoutingReplay, TreeCheckpoints, UnreadPrompts):
    """Mixin that stands *above* a TRL trainer in the MRO and lets it see a policy that runs on rollout trees.

    Overrides the one method through which TRL's losses see a policy; nothing of a loss is copied.
    """

    # What TRL's trainer sets.
    temperature: float
    ref_model: Any

    # The trainer's configuration class; a plain TRL one would lack the tree options.
    _config_class: type
    # Whether the trainer's loss has the router's auxiliary loss.
    router_loss: Support = "refused"

    def __init__(self, model: Any, reward_funcs: Any, args: Any = None, *more: Any, **kwargs: Any) -> None:
        self._begin_trl(super(), model, reward_funcs, self._checked_arguments(args), *more, **kwargs)
        check_sampling(self)
        self._begin_tree(TreePolicy)

    def _checked_arguments(self, args: Any) -> Any:
        """The trainer's arguments, before TRL sees them."""
        check_trl_version()
        if args is None:
            args = self._config_class(output_dir=type(self).__name__)
        if not isinstance(args, self._config_class):
            raise ValueError(f"expected args to be a {self._config_class.__name__}, got {type(args).__name__}")
        return args

    def _begin_trl(self, trl_trainer: Any, *positional: Any, **kwargs: Any) -> None:
        """TRL's own beginning, on the text model of a multimodal checkpoint.

        Args:
            trl_trainer: whose constructor runs: a class, or ``super()``.
            positional: model, what stands between it and the data sets in that class, and what follows; the trainer's
                arguments are among them.
            kwargs: of the constructor.
        """
        model, args = positional[0], next(one for one in positional if isinstance(one, self._config_class))
        if isinstance(model, nn.Module):  # TRL would fail on the wrapper of torch.compile, without a word about it
            check_uncompiled(model)
        check_reference(model, args, is_adapted=kwargs.get("peft_config") is not None)
        if isinstance(model, str):  # Transformers asks a hub that does not answer again and again
            check_model_name("model", model, revision=(args.model_init_kwargs or {}).get("revision"))
        if len(positional) < _BEFORE_PROCESSING_CLASS + 1 and kwargs.get("processing_class") is None:
            kwargs["processing_class"] = load_tokenizer(model, args)
        name_accelerator()
        show_processes()
        with loading_text_models(type(self)), own_collectors(kwargs.get("rollout_func")), old_names():
            trl_trainer.__init__(*positional, **kwargs)

    def _begin_tree(self, policy_class: type[TreePolicy]) -> None:
        """After TRL's own beginning: refuses, then patches."""
        check_settings(self)
        patch(self.model)
        gather_whole_layers(self.model, self.accelerator)
        allow_some_layers(causal_lm_of(self.model))
        reference = getattr(self, "ref_model", None)
        if reference is not None:
            patch(self.accelerator.unwrap_model(reference))
        self._tree: Any = policy_class(self)
        self._begin_routers()

    @property
    def tree_policy(self) -> Any:
        """The policy on rollout trees, a :class:`~harts_hf.trainers.policy.TreePolicy`: planner, ranks, step."""
        return self._tree

    def _begin_routers(self) -> None:
        load, speed = self._tree.expert_load, self.args.tree_expert_bias_update_speed
        add_callback: Any = self.add_callback  # type: ignore[attr-defined]
        if speed:
            add_callback(ExpertBiasUpdate(self.model, load, speed))
            send_bias_to_engines(self)
        if load.observed:
            add_callback(ExpertLoadFiles(load))

    def create_accelerator_and_postprocess(self) -> None:
        """Trainer's; before any model is prepared, so that a reference model is treated as the policy is."""
        parent: Any = super()
        parent.create_accelerator_and_postprocess()
        keep_answers_wide(self.accelerator)

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
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """TRL's hook: ``[B, logits_to_keep]`` log-probs and entropies, 0 where nothing is scored, and the router's
        auxiliary loss.

        Inside an optimizer step's loss phase it hands out the leaves of the current slice; elsewhere (old and
        reference log-probs, evaluation, a teacher in a loss of the user's own) it scores the rows as a tree of their
        own. ``batch_size`` is the planner's business here.

        Raises:
            ValueError: images, an auxiliary loss where the trainer has none, an unpatched model, or a call that would
                need gradients of anything but the policy's log-probs of the slice.
        """
        given = [name for name, value in vision.items() if value is not None]
        if given:
            raise ValueError(f"expected text only, got {', '.join(given)}")
        found: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None] = self._tree.log_probs(
            model,
            input_ids,
            attention_mask,
            logits_to_keep,
            entropy=compute_entropy,
            aux_loss=compute_aux_loss,
        )
        return found

    def check_ready(self) -> None:
        """What `train` refuses before its first step; for callers that want to know before they begin.

        Raises:
            UnsupportedModelError: nothing of the model is trainable, or a part of it has been compiled.
            ValueError: a data set without prompts, or that fills no batch; ``offload`` without a GPU.
        """
        check_prompts(self)
        check_offload(self)
        check_trainable(self.model)
        check_uncompiled(self.model)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's. Slices of a step that an earlier call did not finish are dropped, as its gradients are.

        Raises:
            UnsupportedModelError, ValueError: as `check_ready`.
        """
        self.check_ready()
        self._tree.slices.clear()
        parent: Any = super()
        return parent.train(*args, **kwargs)
