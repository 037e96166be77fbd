"""What tree training refuses, by name, before anything is computed."""

from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import nn

from harts_hf.batch.handoff import CONV_ANCESTORS
from harts_hf.errors import UnsupportedModelError
from harts_hf.modeling.families import Family

TRANSFORMERS_RANGE = ("5.24", "5.25")
LAYER_TYPES = {"full_attention", "linear_attention"}
LOGIT_SCALES = (
    "final_logit_softcapping",
    "logit_scale",
    "output_multiplier",
    "lm_head_multiplier",
    "logits_scaling",
)
BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def check_versions() -> None:
    """Raises UnsupportedModelError outside the tested range of Transformers."""
    low, high = TRANSFORMERS_RANGE
    if not Version(low) <= Version(transformers.__version__) < Version(high):
        raise UnsupportedModelError(
            f"expected transformers >= {low}, < {high} (the range the patches were tested with), got "
            f"{transformers.__version__}"
        )


def check_model(model: nn.Module, family: Family) -> None:
    """Raises UnsupportedModelError for a model of a known family whose settings tree training would get wrong."""
    config: Any = model.config
    for name in ("linear_mixer", "full_mixer"):
        if not hasattr(family.module, getattr(family, name)):
            raise UnsupportedModelError(f"transformers has no {getattr(family, name)} in {family.module.__name__}")
    _check_layers(config)
    family.check_config(config)
    _check_convolutions(model)
    _check_rope(config)
    _check_head(model, config)
    check_dropout(model)
    if any(parameter.dtype == torch.float16 for parameter in model.parameters()):
        raise UnsupportedModelError("expected float32 or bfloat16 parameters, got float16: states would overflow")
    if getattr(model, "is_quantized", False):
        raise UnsupportedModelError("expected unquantized weights, got a quantized model")


def check_checkpointing(model: nn.Module) -> None:
    """Raises UnsupportedModelError where activation checkpointing is on and reentrant.

    A reentrant checkpoint runs its body without gradients first, so states that leave the layer would carry none.
    """
    for module in model.modules():
        function = getattr(module, "_gradient_checkpointing_func", None)
        if function is None or not getattr(module, "gradient_checkpointing", False):
            continue
        if getattr(function, "keywords", {}).get("use_reentrant", False):
            raise UnsupportedModelError(
                "expected non-reentrant activation checkpointing, got use_reentrant=True: pass "
                'gradient_checkpointing_kwargs={"use_reentrant": False}'
            )
        return


def _check_layers(config: Any) -> None:
    unknown = sorted(set(config.layer_types) - LAYER_TYPES)
    if unknown:
        raise UnsupportedModelError(
            f"expected layers of types {sorted(LAYER_TYPES)}, got {unknown} (sliding windows, indexers, lightning "
            "attention and Mamba layers are not supported)"
        )
    if "linear_attention" not in config.layer_types:
        raise UnsupportedModelError("expected at least one linear_attention layer, got none")


def _check_convolutions(model: nn.Module) -> None:
    widths = {name: m.kernel_size[0] for name, m in model.named_modules() if isinstance(m, nn.Conv1d)}
    for name, width in widths.items():
        if width > CONV_ANCESTORS + 1:
            raise UnsupportedModelError(
                f"expected convolutions of at most {CONV_ANCESTORS + 1} taps, got {width} in {name}"
            )


def _check_rope(config: Any) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind in BATCH_DEPENDENT_ROPE:
        raise UnsupportedModelError(
            f"expected rotary frequencies that do not depend on the batch, got rope_type {kind!r}: its frequencies "
            "follow the longest position of each forward, so shared tokens would differ from tokens alone"
        )


def _check_head(model: Any, config: Any) -> None:
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise UnsupportedModelError(
            f"expected a plain nn.Linear as the language-model head, got {type(head).__name__} (adapters on the head "
            "are not supported: leave lm_head out of target_modules)"
        )
    for name in LOGIT_SCALES:
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise UnsupportedModelError(f"expected plain logits, got {name}={getattr(config, name)}")


def check_dropout(model: nn.Module) -> None:
    """Raises UnsupportedModelError for dropout anywhere.

    Scoring and training run a token twice and must agree; a shared token would also share its mask.
    """
    config: Any = model.config
    rates = {f"config.{name}": getattr(config, name) for name in ("attention_dropout", "hidden_dropout", "dropout")
             if hasattr(config, name)}  # fmt: skip
    rates |= {name: module.p for name, module in model.named_modules() if isinstance(module, nn.Dropout)}
    for name, rate in rates.items():
        if rate:
            raise UnsupportedModelError(f"expected dropout 0 everywhere, got {name} = {rate}")
