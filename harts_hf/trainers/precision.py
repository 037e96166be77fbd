"""What of mixed precision a tree trainer changes: under FSDP2 a forward's answer stays in float32."""

from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import DistributedType


def keep_answers_wide(accelerator: Any) -> None:
    """Lets FSDP2 return what modules computed, where it would round it to the training dtype.

    For ``bf16=True`` Accelerate (1.15) asks FSDP2 for bfloat16 parameters, gradients and *outputs*. The root's and the
    head's outputs are log-probs and entropies here, and losses read them from the model's outputs in TRL, too: numbers
    between 8 and 16 are then multiples of 1/16, ratios of probabilities up to 3 % off, and the coefficients of the
    backward have 8 bits. Between layers nothing changes: FSDP2 casts the *inputs* of each.

    Args:
        accelerator: of a trainer whose models are not prepared yet; changed in place.
    """
    if accelerator.distributed_type != DistributedType.FSDP:
        return
    plugin = accelerator.state.fsdp_plugin
    output_dtype = getattr(plugin.mixed_precision_policy, "output_dtype", None)  # FSDP1's policy has none
    if output_dtype is not None and torch.finfo(output_dtype).bits < 32:
        plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, output_dtype=None)
