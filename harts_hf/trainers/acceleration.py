"""Other ways to make a model faster, beside trees: which of them a tree trainer refuses, and why.

docs/gpu.md has what was measured.
"""

from typing import Any

from accelerate.utils import DynamoBackend
from torch import nn
from torch._dynamo import OptimizedModule

from harts_hf.errors import UnsupportedModelError
from harts_hf.modeling import walking


def check_acceleration(trainer: Any) -> None:
    """Refuses Liger's layers, compiled models and FP8 products, however they were asked for.

    Raises:
        UnsupportedModelError: the message has what was asked for, why it is refused, and what there is instead.
    """
    args, accelerator = trainer.args, trainer.accelerator
    if args.use_liger_kernel:
        raise UnsupportedModelError(
            "expected use_liger_kernel=False, got True: Liger's norms, rotary embeddings and SwiGLU would take the "
            "place of those that run on trees when training starts, and it has no linear mixers, gates and experts. "
            "tree_fused_modules='auto' (the default) runs all of these as single operations on a GPU"
        )
    _refuse(_compiled_by_settings(args, accelerator))
    check_uncompiled(trainer.model)
    if accelerator.mixed_precision == "fp8":
        raise UnsupportedModelError(
            "expected mixed precision in bf16 or none, got fp8 (accelerate launch --mixed_precision, or its "
            "configuration): on an H200, FP8 products moved log-probs by 0.26 nats in the mean where bf16 did by "
            "0.02, and took as long with the quantising. Use bf16=True"
        )


def check_uncompiled(model: nn.Module) -> None:
    """Refuses a model of which anything is compiled: given so, or since the trainer was made.

    Raises:
        UnsupportedModelError: the message names it, says why, and what there is instead.
    """
    _refuse(_compiled_part(model))


def _refuse(compiled: str | None) -> None:
    if compiled is not None:
        raise UnsupportedModelError(
            f"expected an uncompiled model, got {compiled}: the forward of a tree takes tables that are others in "
            "each microbatch, so that torch.compile breaks its graph at each mixer; four layers had not compiled "
            "within a minute on an H200. Give the model as it was loaded: tree_fused_modules='auto' (the default) is "
            "what is faster"
        )


def _compiled_by_settings(args: Any, accelerator: Any) -> str | None:
    if args.torch_compile:
        return "torch_compile=True"
    plugin = getattr(accelerator.state, "dynamo_plugin", None)
    if plugin is not None and plugin.backend not in (DynamoBackend.NO, None):
        return f"Accelerate's dynamo backend {plugin.backend.value}"
    return None


def _compiled_part(model: nn.Module) -> str | None:
    for name, module in walking.named_modules(model).items():
        if getattr(module, "_compiled_call_impl", None) is not None:
            return f"{name or 'a model'} after compile()"
        if isinstance(module, OptimizedModule):
            return f"torch.compile of {name or 'a model'}"
        if hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable"):
            return f"torch.compile of {name or 'a model'}'s forward"
    return None
