"""What tree trainers refuse, by name, before any model is patched."""

from typing import Any

import trl
from packaging.version import Version
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.training_args import OptimizerNames

from harts_hf.errors import UnsupportedModelError
from harts_hf.modeling.checks import REENTRANT_MESSAGE, check_experts, check_parallel_sizes
from harts_hf.modeling.patching import causal_lm_of
from harts_hf.trainers.ranks import check_backend

TRL_RANGE = ("1.16", "1.17")
AUX_LOSS_MESSAGE = (
    "expected no MoE auxiliary loss, got one: its value over a tree is not computed yet, and leaving it out would "
    "change the objective silently; set router_aux_loss_coef=0 to train without it"
)


def check_trl_version() -> None:
    """Raises UnsupportedModelError outside the tested range of TRL."""
    low, high = TRL_RANGE
    if not Version(low) <= Version(trl.__version__) < Version(high):
        raise UnsupportedModelError(
            f"expected trl >= {low}, < {high} (its private hooks were tested there), got {trl.__version__}"
        )


def check_settings(trainer: Any) -> None:
    """Refuses settings that the tree step would get wrong, before any model is patched."""
    args = trainer.args
    check_backend(trainer.accelerator)
    check_parallel_sizes(
        {"tensor": trainer.get_tp_size(), "context": trainer.get_cp_size(), "sequence": trainer.get_sp_size()}
    )
    check_experts(causal_lm_of(trainer.model), zero3=is_deepspeed_zero3_enabled())
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
        (
            bool(getattr(args, "ddp_static_graph", False)),
            "DDP that finds out in each step what is used (a step has other microbatches than the one before)",
            "ddp_static_graph=True",
        ),
        (args.optim in optimizers, "an optimizer with a step of its own", f"optim={args.optim}"),
        (args.gradient_checkpointing and kwargs.get("use_reentrant", False), "", REENTRANT_MESSAGE),
    ]
    for wrong, expected, got in refused:
        if wrong:
            raise UnsupportedModelError(f"expected {expected}, got {got}" if expected else got)
