"""The model families that tree training knows, one entry each, and all that they differ in.

A family is supported by naming its two token mixers, the function through which its linear layers run their recurrent
rule, and what its layers hand over. Nothing of the model files is copied: see :mod:`harts_hf.modeling.mixers`.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from torch import nn

from harts_hf.errors import UnsupportedModelError
from harts_hf.kernels.linear_attention import TreeLinearOutput, tree_gated_delta_rule, tree_kimi_delta_rule
from harts_hf.modeling.fused_forwards import (
    Forward,
    bounded_decays,
    centred_norm,
    decays,
    gated_output_norm,
    grouped_experts,
    kimi_output_norm,
    llama_norm,
    mlp,
    olmo_norm,
    router,
)


@dataclass(frozen=True, kw_only=True)
class LinearShape:
    """Sizes of one linear-attention layer.

    Attributes:
        heads: of the state, with a beta each.
        keys: dimension of a head's keys.
        values: dimension of a head's values.
        conv_channels: of the convolution, which are those of q, k and v together.
        decays: per token.
    """

    heads: int
    keys: int
    values: int
    conv_channels: int
    decays: int


@dataclass(frozen=True, kw_only=True)
class Family:
    """How one Transformers model family mixes tokens.

    Attributes:
        model_type: of the text configuration.
        module_name: the folder under ``transformers.models``; of a model that is not Transformers' own, the full name
            of its module, ``package.modeling_mine``.
        linear_mixer: class of the linear-attention layers, by its exact name.
        full_mixer: class of the full-attention layers. (A name ending in ``LinearAttention`` says nothing:
            ``KimiLinearAttention`` is the *full* attention of ``kimi_linear``.)
        rule: the operation on trees in place of the chunkwise rule.
        rule_function: the name that the linear mixer's forward calls for the chunkwise rule.
        linear_shape: sizes of a linear layer, from the configuration.
        key_elements: elements of keys and values that one token hands over in one full-attention layer, from the
            configuration and whether an MLA hands over keys and values (``expand_latents``) or latents.
        gate_projections: names of the linear mixer's projections that make decays and betas.
        rounds_decays: whether the linear mixer rounds decays to the hidden states' dtype; else they are float32.
        joins_convolutions: whether loading joins the convolutions of queries, keys and values. Transformers (5.24)
            joins each process's part of the three, so a model that it shards while loading has other channels'
            weights, and is refused.
        fused_modules: on a tree on a GPU, the forwards of other classes of the module, by exact name
            (:mod:`harts_hf.modeling.fused_forwards`); classes without one run as they are, which is right and slower.
        rotary_function: the name that the full mixer's forward calls to turn queries and keys, ``(q, k, cos, sin)``,
            which a GPU then runs as one operation each; None runs it as it is.
        rotates_pairs: whether that function turns entries side by side, instead of a head's two halves.
        check_config: raises UnsupportedModelError for a configuration of another architecture with this model_type.
    """

    model_type: str
    module_name: str
    linear_mixer: str
    full_mixer: str
    rule: Callable[..., TreeLinearOutput]
    rule_function: str
    linear_shape: Callable[[Any], LinearShape]
    key_elements: Callable[[Any, bool], int]
    gate_projections: tuple[str, ...]
    rounds_decays: bool = False
    joins_convolutions: bool = False
    fused_modules: Mapping[str, Forward] = field(default_factory=dict, hash=False)
    rotary_function: str | None = None
    rotates_pairs: bool = False
    check_config: Callable[[Any], None] = lambda config: None

    @property
    def module(self) -> ModuleType:
        """The modeling module."""
        if "." in self.module_name:
            return importlib.import_module(self.module_name)
        return importlib.import_module(f"transformers.models.{self.module_name}.modeling_{self.module_name}")

    def class_named(self, name: str) -> type[nn.Module]:
        """A class of the modeling module.

        Raises:
            ValueError: the module has none of that name.
        """
        found = getattr(self.module, name, None)
        if not isinstance(found, type):
            raise ValueError(f"expected a class of {self.module.__name__} for {self.model_type}, got {name!r}")
        return found


def gated_delta_shape(config: Any) -> LinearShape:
    """Of a Gated DeltaNet whose configuration names its sizes as Qwen3.5's does (``linear_num_key_heads``, ...)."""
    heads, keys, values = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    channels = 2 * config.linear_num_key_heads * keys + heads * values
    return LinearShape(heads=heads, keys=keys, values=values, conv_channels=channels, decays=heads)


def _kimi_shape(config: Any) -> LinearShape:
    heads, dim = config.linear_num_heads, config.linear_head_dim
    return LinearShape(heads=heads, keys=dim, values=dim, conv_channels=3 * heads * dim, decays=heads * dim)


def grouped_keys(config: Any, expand_latents: bool) -> int:
    """Keys and values of grouped-query attention, ``2 * num_key_value_heads * head_dim``."""
    # Configurations may leave the head dim out, as Olmo's do.
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_key_value_heads * head_dim


def _latent_keys(config: Any, expand_latents: bool) -> int:
    if not expand_latents:
        return config.kv_lora_rank + config.qk_rope_head_dim
    return config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)


def _refuse_lightning(config: Any) -> None:
    """Ling-2.6 shares its model_type with Ling-3.0, and Transformers would build Ling-3.0's layers from it."""
    keys = ("group_norm_size", "linear_silu", "linear_rope", "linear_mode")
    found = [key for key in keys if getattr(config, key, None) not in (None, False)]
    if found:
        raise UnsupportedModelError(
            f"expected Ling-3.0's KDA layers, got a configuration of lightning attention ({', '.join(found)}, as "
            "Ling-2.6 has)"
        )


_QWEN: dict[str, Forward] = {"RMSNorm": centred_norm, "RMSNormGated": gated_output_norm, "MLP": mlp}
_QWEN_MOE: dict[str, Forward] = {**_QWEN, "Experts": grouped_experts}
_OLMO: dict[str, Forward] = {"RMSNorm": olmo_norm, "RMSNormGated": gated_output_norm, "MLP": mlp}
_KIMI: dict[str, Forward] = {
    "RMSNorm": llama_norm,
    "RMSNormGated": kimi_output_norm,
    "MLP": mlp,
    "Experts": grouped_experts,
    "TopkRouter": router,
}


def _named(prefix: str, forwards: dict[str, Forward]) -> dict[str, Forward]:
    return {prefix + name: forward for name, forward in forwards.items()}


def _gated_delta(
    model_type: str,
    module_name: str,
    prefix: str,
    *gate_projections: str,
    fused: dict[str, Forward],
    rotary_function: str | None = "apply_rotary_pos_emb",
) -> Family:
    """GDN, one decay per head."""
    return Family(
        model_type=model_type,
        module_name=module_name,
        linear_mixer=f"{prefix}GatedDeltaNet",
        full_mixer=f"{prefix}Attention",
        rule=tree_gated_delta_rule,
        rule_function="torch_chunk_gated_delta_rule",
        linear_shape=gated_delta_shape,
        key_elements=grouped_keys,
        gate_projections=gate_projections,
        fused_modules=_named(prefix, fused),
        rotary_function=rotary_function,
    )


def _kimi_delta(
    model_type: str, prefix: str, *gate_projections: str, fused_decays: Forward, **differences: Any
) -> Family:
    """KDA, one decay per channel, beside MLA."""
    return Family(
        model_type=model_type,
        module_name=model_type,
        linear_mixer=f"{prefix}DeltaAttention",
        full_mixer=f"{prefix}Attention",
        rule=tree_kimi_delta_rule,
        rule_function="chunk_kimi_delta_attention",
        linear_shape=_kimi_shape,
        key_elements=_latent_keys,
        gate_projections=gate_projections,
        joins_convolutions=True,
        fused_modules=_named(prefix, {**_KIMI, "ForgetGate": fused_decays}),
        **differences,
    )


FAMILIES = {
    family.model_type: family
    for family in (
        _kimi_delta(
            "bailing_hybrid",
            "BailingHybrid",
            "b_proj",
            "f_proj",
            rounds_decays=True,
            check_config=_refuse_lightning,
            fused_decays=bounded_decays,
            rotary_function="apply_rotary_pos_emb_interleave",
            rotates_pairs=True,
        ),
        _gated_delta("qwen3_5_text", "qwen3_5", "Qwen3_5", "in_proj_a", "in_proj_b", fused=_QWEN),
        _gated_delta("qwen3_5_moe_text", "qwen3_5_moe", "Qwen3_5Moe", "in_proj_a", "in_proj_b", fused=_QWEN_MOE),
        _gated_delta("qwen3_next", "qwen3_next", "Qwen3Next", "in_proj_ba", fused=_QWEN_MOE),
        _kimi_delta("kimi_linear", "KimiLinear", "b_proj", "f_a_proj", "f_b_proj", fused_decays=decays),
        _gated_delta(
            "olmo_hybrid", "olmo_hybrid", "OlmoHybrid", "a_proj", "b_proj", fused=_OLMO, rotary_function=None
        ),
    )
}


def register_family(family: Family) -> None:
    """Makes a model family of one's own known, for this process; before a model of it is patched.

    The mixers' forwards have to call the causal convolution, the chunkwise rule and attention by the names that they
    have in their module, as Transformers' do (docs/model-families.md); others are refused when a model is patched.
    Whether it is the same training is what :func:`harts_hf.verify.verify` tells.

    Raises:
        ValueError: a ``model_type`` that is known already, by another entry.
    """
    known = FAMILIES.get(family.model_type)
    if known is not None and known != family:
        raise ValueError(f"expected a model_type that no family has, got {family.model_type!r} of {known.module_name}")
    FAMILIES[family.model_type] = family


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
