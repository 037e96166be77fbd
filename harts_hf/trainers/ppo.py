"""PPO on rollout trees: policy and values from one forward, advantages along the paths."""

import json
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import DistributedType
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from trl import GRPOTrainer
from trl.trainer.utils import disable_dropout_in_model

from harts_hf.errors import UnsupportedModelError
from harts_hf.modeling import patch, vocab_size_of
from harts_hf.modeling.checkpointing import allow_some_layers
from harts_hf.modeling.patching import causal_lm_of
from harts_hf.trainers.episodes import TreeEpisodes
from harts_hf.trainers.hooks import TreeHooks
from harts_hf.trainers.off_policy import TreeOffPolicy
from harts_hf.trainers.policy import TreePolicy
from harts_hf.trainers.ppo_config import TreePPOConfig
from harts_hf.trainers.ppo_minibatches import deal_trees
from harts_hf.trainers.ppo_policy import OTHERWISE, TreeActorCritic
from harts_hf.trainers.ppo_rollouts import TREE, TreePPORollouts
from harts_hf.trainers.resuming import load_weights
from harts_hf.trainers.rows import ROUTES
from harts_hf.trainers.step import TreeStep
from harts_hf.trainers.value_head import head_taken_out, hide_from_engines, is_of_value_head, load_head, save_head

KL_FILE = "ppo_state.json"
VALUE_MODEL_FOLDER = "value_model"


# TRL leaves its training_step untyped, so mypy finds it unlike TreeStep's.
class TreePPOTrainer(TreePPORollouts, TreeOffPolicy, TreeEpisodes, TreeHooks, GRPOTrainer, TreeStep):  # type: ignore[misc]
    """Proximal policy optimisation (Schulman et al., arXiv 1707.06347) of every token that trajectories share once.

    Rollouts, rewards and logging are [`GRPOTrainer`]'s; groups are not needed. A value head on the policy's backbone
    says from the same forward what each state is worth, and generalised advantage estimation runs along each path (a
    token that trajectories share has one value, and on each of them its own advantage). See docs/ppo.md. Constructor
    arguments are [`GRPOTrainer`]'s, with a [`TreePPOConfig`], and:

    Args:
        value_model: a causal language model of a supported family (or where to load one from) that is trained to give
            the values instead of a head on the policy, in one process or under DDP; its vocabulary is the policy's.

    Raises:
        UnsupportedModelError: a model or a setting that tree training would get wrong; the message names it.
        ValueError: a value model that is none, that has parameters of the policy or another vocabulary.
    """

    _tag_names = ["trl", "ppo", "harts"]  # noqa: RUF012 - TRL's own convention

    _config_class = TreePPOConfig
    replays_engine_routes = replays_old_routes = True
    # Whether the value's parameters have been put into groups of their own.
    _has_value_groups = False

    def __init__(
        self,
        model: Any,
        reward_funcs: Any,
        args: Any = None,
        *more: Any,
        value_model: PreTrainedModel | PathLike[str] | str | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(reward_funcs, list | tuple) and not reward_funcs:
            raise ValueError("expected a reward function (of zeros, where turn_rewards say all of it), got none")
        self.value_model: Any = _known_value_model(value_model)
        super().__init__(model, reward_funcs, args, *more, **kwargs)

    def _begin_tree(self, policy_class: type[TreePolicy]) -> None:
        if self.value_model is not None:
            self._begin_value_model()
        plugin = getattr(self.accelerator.state, "deepspeed_plugin", None)
        if plugin is not None and "optimizer" in plugin.deepspeed_config and self.args.value_learning_rate is not None:
            raise UnsupportedModelError(
                "expected a DeepSpeed configuration without 'optimizer' with value_learning_rate (that optimizer has "
                "one rate for all), got one that has it: let the trainer's optim make the optimizer"
            )
        super()._begin_tree(TreeActorCritic)
        hide_from_engines(self)

    def _begin_value_model(self) -> None:
        kind = self.accelerator.distributed_type
        if kind in (DistributedType.FSDP, DistributedType.DEEPSPEED):
            raise UnsupportedModelError(
                f"expected a value head on the policy under {kind.value}, got a value_model (which is trained in one "
                "process and under DDP): leave value_model out"
            )
        if isinstance(self.value_model, str | PathLike):
            self.value_model = AutoModelForCausalLM.from_pretrained(self.value_model, dtype=self.model.dtype)
        own = set(map(id, self.value_model.parameters()))
        shared = next((name for name, one in self.model.named_parameters() if id(one) in own), None)
        if shared is not None:
            raise ValueError(
                f"expected a value_model with parameters of its own, got one that has the policy's {shared}: give a "
                "copy, or leave value_model out for a value head on the policy"
            )
        if vocab_size_of(self.value_model) != vocab_size_of(self.model):
            raise ValueError(
                f"expected a value_model with the policy's vocabulary of {vocab_size_of(self.model)}, got "
                f"{vocab_size_of(self.value_model)} tokens"
            )
        if self.args.gradient_checkpointing:
            allow_some_layers(self.value_model)
            self.value_model.gradient_checkpointing_enable(self.args.gradient_checkpointing_kwargs)
        if self.args.disable_dropout:
            disable_dropout_in_model(self.value_model)
        patch(self.value_model.to(self.args.device))

    def create_optimizer(self, model: Any = None) -> Any:
        """Trainer's, or the one that was given; the value head's or value model's parameters in groups of their own
        where that matters, or where the optimizer lacks them (one that was made before this trainer has no head).

        Raises:
            ValueError: such an optimizer came with a schedule, which would know nothing of these groups.
        """
        optimizer = super().create_optimizer(model)
        tree: TreeActorCritic = self._tree
        rate = self.args.value_learning_rate
        module = tree.head if tree.value_model is None else tree.value_model
        own = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
        groups = [set(map(id, group["params"])) for group in optimizer.param_groups]
        # A group of one's own may be there by accident, with the policy's rate: biases of a head under LoRA are one.
        has_rate = self._has_value_groups and own <= set().union(*(group for group in groups if group <= own))
        if own <= set().union(*groups) and (rate is None or has_rate):
            return optimizer
        if self.lr_scheduler is not None:
            raise ValueError(
                "expected optimizers=(optimizer, None), since the value's parameters become groups of that optimizer, "
                f"got a schedule with it ({type(self.lr_scheduler).__name__})"
            )
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in own]
        decayed = set(self.get_decay_parameter_names(module))
        for decay in (True, False):
            parameters = [
                parameter
                for name, parameter in module.named_parameters()
                if parameter.requires_grad and (name in decayed) == decay
            ]
            options = {"weight_decay": self.args.weight_decay if decay else 0.0}
            if rate is not None:
                options["lr"] = rate
            optimizer.add_param_group({"params": parameters, **options})
        self._has_value_groups = True
        return optimizer

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """A minibatch of whole trees at the last micro-step of each optimizer step, None at the others.

        Every epoch over a generation batch deals its trees anew; TRL permutes rows once and repeats equal slices.
        """
        if not self.model.training:
            return self._generate_and_score_completions(generation_batch)
        per_epoch: int = self.args.steps_per_generation
        if self._step % (per_epoch * self.num_iterations) == 0 or self._buffered_inputs is None:
            # All of it, and minibatches as they come: a checkpoint keeps it, and the order is drawn again.
            self._buffered_inputs: Any = [self._generate_and_score_completions(generation_batch)]
        if not self.accelerator.sync_gradients:
            return None
        accumulation, number = self.args.gradient_accumulation_steps, self._step % per_epoch
        batch: dict[str, Any] = self._buffered_inputs[0]
        tree = batch[TREE].cpu().numpy()
        minibatch = number // accumulation
        # The optimizer step that the epoch began with.
        first_step = self.state.global_step - minibatch
        key = (self.args.seed, first_step, self.accelerator.process_index)
        chosen = deal_trees(int(tree[-1]) + 1, self.args.num_minibatches, key)[minibatch]
        return _rows_of(batch, np.flatnonzero(np.isin(tree, chosen)))

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """PPO's loss of a minibatch: clipped policy and value losses, entropy bonus, KL where it is in the loss.

        Per token of the generation batch: a sum over the minibatch's trained tokens, divided by the mean number of
        trained tokens of its epoch's minibatches, over all processes. So each token weighs the same, in whichever
        minibatch it falls.
        """
        if return_outputs:
            raise ValueError("expected losses without outputs (prediction_loss_only=True), got return_outputs=True")
        loss: torch.Tensor = self._tree.loss(inputs)
        return loss

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Trainer's, and beside it the value head (``value_head.safetensors``) or the value model (``value_model``).

        The policy's own files have no value head, so that it loads by itself.
        """
        folder = Path(output_dir or self.args.output_dir)
        tree: TreeActorCritic = self._tree
        if tree.value_model is None:
            save_head(tree.head, folder, writes=self.args.should_save)
        elif self.args.should_save:
            save_head(tree.head, folder / VALUE_MODEL_FOLDER, writes=True)
            value_model: Any = self.accelerator.unwrap_model(tree.value_model)
            with head_taken_out(value_model):
                value_model.save_pretrained(folder / VALUE_MODEL_FOLDER)
        super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if state_dict is not None:
            super()._save(output_dir, {name: v for name, v in state_dict.items() if not is_of_value_head(name)})
            return
        with head_taken_out(self.accelerator.unwrap_model(self.model)):
            super()._save(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._load_values(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if not self.is_deepspeed_enabled:
            assert self.state.best_model_checkpoint is not None
            self._load_values(self.state.best_model_checkpoint)

    def _load_values(self, folder: str) -> None:
        tree: TreeActorCritic = self._tree
        if tree.value_model is None:
            load_head(tree.head, Path(folder))
            return
        path = Path(folder) / VALUE_MODEL_FOLDER
        if not load_weights(self.accelerator.unwrap_model(tree.value_model), str(path)):
            raise ValueError(
                f"expected a checkpoint with a value model ({VALUE_MODEL_FOLDER}), got {folder!r} without"
            )

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.kl_target is not None and self.args.should_save:
            (Path(output_dir) / KL_FILE).write_text(json.dumps({"kl_coef": self.beta}) + "\n")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        path = None if checkpoint is None else Path(checkpoint) / KL_FILE
        if self.args.kl_target is not None and path is not None and path.is_file():
            self.beta = json.loads(path.read_text())["kl_coef"]


def _known_value_model(value_model: Any) -> Any:
    """A model, or where one is; looked for before the policy is loaded."""
    if isinstance(value_model, str | PathLike):
        try:
            AutoConfig.from_pretrained(value_model)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"expected value_model to be a causal language model, or where to load one from, got "
                f"{str(value_model)!r}: {error}"
            ) from error
    elif value_model is not None and not (
        isinstance(value_model, nn.Module) and isinstance(causal_lm_of(value_model), PreTrainedModel)
    ):
        raise ValueError(
            "expected value_model to be a causal language model of a supported family, or where to load one from, got "
            f"{'a ' + type(value_model).__name__ if isinstance(value_model, nn.Module) else repr(value_model)}"
        )
    return value_model


def _rows_of(batch: dict[str, Any], rows: np.ndarray) -> dict[str, Any]:
    """Some rows of a batch; numbers, and what is not by row, as they are."""
    count = len(batch["completion_ids"])
    index = torch.from_numpy(rows).to(batch["completion_ids"].device)
    routes = {ROUTES: [batch[ROUTES][row] for row in rows.tolist()]} if ROUTES in batch else {}
    return routes | {
        key: value[index] if isinstance(value, torch.Tensor) and value.ndim and key != OTHERWISE else value
        for key, value in batch.items()
        if not isinstance(value, list) or len(value) != count
    }
