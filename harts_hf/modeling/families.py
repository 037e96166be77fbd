"""The model families that tree training knows, one entry each.

A family is supported by naming its two token mixers and the function through which its linear layers run their
recurrent rule. Nothing of the model files is copied: see :mod:`harts_hf.modeling.mixers`.
"""

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

from torch import nn

from harts_hf.errors import UnsupportedModelError


@dataclass(frozen=True, kw_only=True)
class Family:
    """How one Transformers model family mixes tokens.

    Attributes:
        model_type: of the text configuration.
        module_name: the folder under ``transformers.models``.
        linear_mixer: class of the linear-attention layers, by its exact name.
        full_mixer: class of the full-attention layers. (A name ending in ``LinearAttention`` says nothing:
            ``KimiLinearAttention`` is the *full* attention of ``kimi_linear``.)
        rule: ``"gated_delta"`` (GDN, one decay a head) or ``"kimi_delta"`` (KDA, one decay a channel).
        rule_function: the name that the linear mixer's forward calls for the chunkwise rule.
    """

    model_type: str
    module_name: str
    linear_mixer: str
    full_mixer: str
    rule: Literal["gated_delta", "kimi_delta"]
    rule_function: str

    @property
    def module(self) -> ModuleType:
        """The modeling module of Transformers."""
        return importlib.import_module(f"transformers.models.{self.module_name}.modeling_{self.module_name}")

    def class_named(self, name: str) -> type[nn.Module]:
        """A class of the modeling module."""
        return getattr(self.module, name)


def _gated_delta(model_type: str, module_name: str, prefix: str) -> Family:
    return Family(
        model_type=model_type,
        module_name=module_name,
        linear_mixer=f"{prefix}GatedDeltaNet",
        full_mixer=f"{prefix}Attention",
        rule="gated_delta",
        rule_function="torch_chunk_gated_delta_rule",
    )


def _kimi_delta(model_type: str, prefix: str) -> Family:
    return Family(
        model_type=model_type,
        module_name=model_type,
        linear_mixer=f"{prefix}DeltaAttention",
        full_mixer=f"{prefix}Attention",
        rule="kimi_delta",
        rule_function="chunk_kimi_delta_attention",
    )


FAMILIES = {
    family.model_type: family
    for family in (
        _kimi_delta("bailing_hybrid", "BailingHybrid"),
        _gated_delta("qwen3_5_text", "qwen3_5", "Qwen3_5"),
        _gated_delta("qwen3_5_moe_text", "qwen3_5_moe", "Qwen3_5Moe"),
        _gated_delta("qwen3_next", "qwen3_next", "Qwen3Next"),
        _kimi_delta("kimi_linear", "KimiLinear"),
        _gated_delta("olmo_hybrid", "olmo_hybrid", "OlmoHybrid"),
    )
}


def family_of(model: nn.Module) -> Family:
    """The family of a model.

    Raises:
        UnsupportedModelError: none of :data:`FAMILIES`.
    """
    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    text_type = getattr(getattr(config, "text_config", None), "model_type", None)
    if text_type in FAMILIES:
        raise UnsupportedModelError(
            f"expected a text-only causal language model, got {type(model).__name__} ({model_type}): load its text "
            f"model (model_type {text_type}) instead, images and videos are not supported"
        )
    raise UnsupportedModelError(
        f"expected a model of one of the families {', '.join(sorted(FAMILIES))}, got {type(model).__name__} "
        f"with model_type {model_type!r}"
    )
