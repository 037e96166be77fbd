"""Bytes of what microbatches of a model hand to one another, from its configuration."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from harts_hf.batch import Kind
from harts_hf.batch.handoff import CONV_ANCESTORS
from harts_hf.modeling.families import family_of
from harts_hf.modeling.patching import causal_lm_of
from harts_hf.planner import CHUNK_SIZE, CostModel

# A boundary lies anywhere in a chunk, so on average it hands over half a chunk of rows to be replayed.
REPLAYED_ROWS = (CHUNK_SIZE - 1) / 2


@dataclass(frozen=True, kw_only=True)
class HandedSizes:
    """Bytes of one handed row (or state) over all layers.

    Attributes:
        values: by kind.
        gradients: by kind; they are float32 or wider.
    """

    values: dict[Kind, int]
    gradients: dict[Kind, int]


def handed_sizes(
    model: nn.Module, dtype: torch.dtype, *, keys_dtype: torch.dtype | None = None, expand_latents: bool = False
) -> HandedSizes:
    """What a model of a supported family hands over.

    Args:
        model: may be patched, and inside a PEFT model.
        dtype: that the layers compute in, float32 or bfloat16.
        keys_dtype: of keys and values, if another one. Under autocast families differ, and the parameters' dtype is
            the widest.
        expand_latents: whether an MLA hands over keys and values instead of latents.
    """
    base = causal_lm_of(model)
    config, rule = base.config, family_of(base).rule
    heads, keys, values, conv = _kimi(config) if rule == "kimi_delta" else _gated(config)
    decays = heads * keys if rule == "kimi_delta" else heads
    narrow, wide = dtype.itemsize, max(4, dtype.itemsize)
    key = (keys_dtype or dtype).itemsize
    linear = conv + heads  # q, k, v and beta
    decay = key if config.model_type == "bailing_hybrid" else 4  # the one family that rounds decays to hidden states'
    full_layers = config.layer_types.count("full_attention")
    linear_layers = config.layer_types.count("linear_attention")
    row = full_layers * _keys(config, expand_latents=expand_latents)
    state = linear_layers * heads * keys * values
    return HandedSizes(
        values={
            "keys": row * key,
            "states": state * wide,
            "linear": linear_layers * (linear * narrow + decays * decay),
            "conv": linear_layers * conv * narrow,
        },
        gradients={
            "keys": row * max(4, key),
            "states": state * wide,
            "linear": linear_layers * (linear + decays) * wide,
            "conv": linear_layers * conv * wide,
        },
    )


def with_handed_bytes(cost: CostModel, sizes: HandedSizes) -> CostModel:
    """A cost model whose bytes of handed rows and boundaries are those of a model."""

    def boundary(sizes: dict[Kind, int]) -> float:
        return sizes["states"] + REPLAYED_ROWS * sizes["linear"] + CONV_ANCESTORS * sizes["conv"]

    row, row_gradient = sizes.values["keys"], sizes.gradients["keys"]
    state, state_gradient = boundary(sizes.values), boundary(sizes.gradients)
    return replace(
        cost,
        source=f"{cost.source}; handed bytes of the model",
        handoff_bytes_per_row=float(row + row_gradient),
        handoff_bytes_per_state=state + state_gradient,
        gradient_part_of_row=row_gradient / (row + row_gradient) if row else 0.0,
        gradient_part_of_state=state_gradient / (state + state_gradient),
    )


def _kimi(config: Any) -> tuple[int, int, int, int]:
    """Heads of the state, its K and V, and channels of the convolution, which are those of q, k and v."""
    heads, dim = config.linear_num_heads, config.linear_head_dim
    return heads, dim, dim, 3 * heads * dim


def _gated(config: Any) -> tuple[int, int, int, int]:
    heads, keys, values = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    return heads, keys, values, 2 * config.linear_num_key_heads * keys + heads * values


def _keys(config: Any, *, expand_latents: bool) -> int:
    """Elements of keys and values of one row in one layer."""
    latents = getattr(config, "kv_lora_rank", None)
    if not latents:
        # Configurations may leave it out, as Olmo's do.
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 2 * config.num_key_value_heads * head_dim
    if not expand_latents:
        return latents + config.qk_rope_head_dim
    return config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
