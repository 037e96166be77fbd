"""Bytes of what microbatches of a model hand to one another, from its configuration."""

from dataclasses import dataclass, replace

import torch
from torch import nn

from harts_hf.batch import HandedKind
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

    values: dict[HandedKind, int]
    gradients: dict[HandedKind, int]


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
    config, family = base.config, family_of(base)
    shape = family.linear_shape(config)
    narrow, wide = dtype.itemsize, max(4, dtype.itemsize)
    key = (keys_dtype or dtype).itemsize
    linear = shape.conv_channels + shape.heads  # q, k, v and beta
    decay = key if family.rounds_decays else 4
    full_layers = config.layer_types.count("full_attention")
    linear_layers = config.layer_types.count("linear_attention")
    row = full_layers * family.key_elements(config, expand_latents)
    state = linear_layers * shape.heads * shape.keys * shape.values
    return HandedSizes(
        values={
            "keys": row * key,
            "states": state * wide,
            "linear": linear_layers * (linear * narrow + shape.decays * decay),
            "conv": linear_layers * shape.conv_channels * narrow,
        },
        gradients={
            "keys": row * max(4, key),
            "states": state * wide,
            "linear": linear_layers * (linear + shape.decays) * wide,
            "conv": linear_layers * shape.conv_channels * wide,
        },
    )


def with_handed_bytes(cost: CostModel, sizes: HandedSizes) -> CostModel:
    """A cost model whose bytes of handed rows and boundaries are those of a model."""

    def boundary(sizes: dict[HandedKind, int]) -> float:
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
