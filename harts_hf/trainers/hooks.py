"""The hooks above TRL's trainer: where its losses see the policy, and what enters its batches."""

from dataclasses import replace
from typing import Any

import torch
import trl
from accelerate.utils import DistributedType
from packaging.version import Version
from torch import nn
from transformers.training_args import OptimizerNames

from harts_hf.errors import UnsupportedModelError
from harts_hf.modeling import handed_sizes, is_patched, patch, vocab_size_of, with_handed_bytes
from harts_hf.modeling.sizes import HandedSizes
from harts_hf.planner import CostModel
from harts_hf.runtime import HeadOptions
from harts_hf.trainers.collator import TreeDataCollator
from harts_hf.trainers.ranks import check_backend
from harts_hf.trainers.resuming import load_weights
from harts_hf.trainers.rows import PaddedRows, plan_rows, spread
from harts_hf.trainers.step import SliceLeaves

TRL_RANGE = ("1.16", "1.17")


class TreeHooks:
    """Mixin that stands *above* a TRL trainer in the MRO and lets it see a policy that runs on rollout trees.

    Overrides the one method through which TRL's losses see a policy; nothing of a loss is copied.
    """

    # What TRL's trainer sets.
    model: Any
    args: Any
    accelerator: Any
    temperature: float
    state: Any
    ref_model: Any
    _tree_run: Any

    # The trainer's configuration class; a plain TRL one would lack the tree options.
    _config_class: type

    def __init__(self, model: Any, reward_funcs: Any, args: Any = None, **kwargs: Any) -> None:
        _check_trl_version()
        if args is None:
            args = self._config_class(output_dir=type(self).__name__)
        if not isinstance(args, self._config_class):
            raise ValueError(f"expected args to be a {self._config_class.__name__}, got {type(args).__name__}")
        self._tree_slices: list[dict[str, Any]] = []
        self._tree_leaves: SliceLeaves | None = None
        parent: Any = super()
        parent.__init__(model, reward_funcs, args=args, **kwargs)
        _check_arguments(self)
        patch(self.model)
        if self.ref_model is not None:
            patch(self.accelerator.unwrap_model(self.ref_model))
        options = self.args
        planner = options.planner_config()
        planner = replace(planner, cost=with_handed_bytes(planner.cost or CostModel(), self._handed_sizes()))
        self._tree_collator = TreeDataCollator(planner=planner, vocab_size=vocab_size_of(self.model))
        self._tree_head = HeadOptions(
            temperature=self.temperature,
            head_in_fp32=getattr(options, "cast_lm_head_to_fp32", False),
        )

    def _handed_sizes(self) -> HandedSizes:
        stored = next(self.model.parameters()).dtype
        return handed_sizes(
            self.model,
            torch.bfloat16 if self.args.bf16 else stored,
            keys_dtype=stored,  # autocast leaves what rotary embeddings and norms return in float32
            expand_latents=self.args.tree_handoff_latents == "expanded",
        )

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
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        """TRL's hook: ``[B, logits_to_keep]`` log-probs and entropies, 0 where nothing is scored, and no aux loss.

        Inside an optimizer step's loss phase it hands out the leaves of the current slice; elsewhere (old and
        reference log-probs, evaluation, a teacher in a loss of the user's own) it scores the rows as a tree of their
        own. ``batch_size`` is the planner's business here.

        Raises:
            ValueError: images, an auxiliary loss, an unpatched model, or a call that would need gradients of
                anything but the policy's log-probs of the slice.
        """
        given = [name for name, value in vision.items() if value is not None]
        if given:
            raise ValueError(f"expected text only, got {', '.join(given)}")
        if compute_aux_loss:
            raise ValueError(AUX_LOSS_MESSAGE)
        leaves = self._tree_leaves
        asked, policy = self.accelerator.unwrap_model(model), self.accelerator.unwrap_model(self.model)
        if leaves is not None and asked is policy and leaves.answers(policy, input_ids, logits_to_keep):
            return leaves.log_probs, leaves.entropies.float(), None  # TRL compares these with a float32 quantile
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in asked.parameters()):
            raise ValueError(
                "expected gradients to be asked for the policy's log-probs of a step's own rows only, got "
                + ("another model" if asked is not policy else "other rows" if leaves else "a call outside a step")
                + ": score under torch.no_grad()"
            )
        if not is_patched(asked):
            raise ValueError("expected a model that runs on trees, got an unpatched one: call harts_hf.patch on it")
        rows = PaddedRows.from_tensors(input_ids, attention_mask, logits_to_keep)
        window, (index,) = plan_rows([rows], self._tree_collator)
        run = self._tree_run(model, window.to(input_ids.device), mode="score")
        scores = run.score(return_entropy=compute_entropy)
        entropy = None if scores.entropy is None else spread(scores.entropy, index).float()
        return spread(scores.log_probs, index), entropy, None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's. Slices of a step that an earlier call did not finish are dropped, as its gradients are."""
        self._tree_slices.clear()
        parent: Any = super()
        return parent.train(*args, **kwargs)

    def _load_best_model(self) -> None:
        """Trainer's, but whole models are loaded with the names that they were saved under."""
        parent: Any = super()
        if not self._loads_itself(self.model, self.state.best_model_checkpoint):
            parent._load_best_model()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Trainer's, but whole models are loaded with the names that they were saved under."""
        parent: Any = super()
        target = self.model if model is None else model
        if not self._loads_itself(target, resume_from_checkpoint):
            parent._load_from_checkpoint(resume_from_checkpoint, model)

    def _loads_itself(self, target: Any, folder: str) -> bool:
        sharded = self.accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
        return not sharded and not hasattr(target, "peft_config") and load_weights(target, folder)


AUX_LOSS_MESSAGE = (
    "expected no MoE auxiliary loss, got one: its value over a tree is not computed yet, and leaving it out would "
    "change the objective silently; set router_aux_loss_coef=0 to train without it"
)


def _check_trl_version() -> None:
    low, high = TRL_RANGE
    if not Version(low) <= Version(trl.__version__) < Version(high):
        raise UnsupportedModelError(
            f"expected trl >= {low}, < {high} (its private hooks were tested there), got {trl.__version__}"
        )


def _check_arguments(trainer: Any) -> None:
    """Refuses settings that the tree step would get wrong, before any model is patched."""
    args = trainer.args
    check_backend(trainer.accelerator, args.tree_execution)
    kwargs = args.gradient_checkpointing_kwargs or {}
    # They step inside the backward, so several times in a window of several microbatches.
    optimizers = [name for name in OptimizerNames if name.endswith(("lomo", "layerwise"))]
    refused: list[tuple[bool, str, str]] = [
        (getattr(trainer, "aux_loss_enabled", False), "", AUX_LOSS_MESSAGE),
        (args.fp16, "bf16 or fp32 training (states would overflow in fp16)", "fp16=True"),
        (args.torch_compile, "an uncompiled model", "torch_compile=True"),
        (args.use_liger_kernel, "the model's own layers", "use_liger_kernel=True"),
        (
            args.neftune_noise_alpha is not None,
            "equal embeddings of a shared token (NEFTune draws noise for every trajectory)",
            f"neftune_noise_alpha={args.neftune_noise_alpha}",
        ),
        (args.optim in optimizers, "an optimizer with a step of its own", f"optim={args.optim}"),
        (
            args.gradient_checkpointing and kwargs.get("use_reentrant", False),
            "non-reentrant activation checkpointing",
            "use_reentrant=True in gradient_checkpointing_kwargs",
        ),
    ]
    for wrong, expected, got in refused:
        if wrong:
            raise UnsupportedModelError(f"expected {expected}, got {got}" if expected else got)
