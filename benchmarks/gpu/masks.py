"""Other ways to write FlashAttention-4's mask of partial tiles, to be measured beside the package's own.

Each entry of ``VARIANTS`` is a mask and a function that gives its tensors for intervals over ``N`` queries and
``E + N`` keys. ``package`` is what the package runs.
"""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
import torch
from flash_attn.cute import utils

from harts_hf.batch import AttentionIntervals
from harts_hf.kernels.attention.flash_mask import interval_mask


@cute.jit
def own_mask(batch, head, query, key, seqlen_info, aux_tensors):
    """Only where no keys are handed over: ``lo`` is the key itself, so one load is left."""
    hi = utils.scalar_to_ssa(aux_tensors[0][key[0]], cutlass.Int32)
    return (query >= key) & (query < hi)


@cute.jit
def packed_mask(batch, head, query, key, seqlen_info, aux_tensors):
    """``lo`` and the interval's length in one 64-bit word; one unsigned comparison."""
    word = aux_tensors[0][key[0]]
    lo = utils.scalar_to_ssa(cutlass.Int32(word), cutlass.Int32)
    length = utils.scalar_to_ssa(cutlass.Uint32(cutlass.Int32(word >> 32)), cutlass.Uint32)
    return (query - lo).to(cutlass.Uint32) < length


@cute.jit
def packed_signed_mask(batch, head, query, key, seqlen_info, aux_tensors):
    """``lo`` and ``hi`` in one 64-bit word."""
    word = aux_tensors[0][key[0]]
    lo = utils.scalar_to_ssa(cutlass.Int32(word), cutlass.Int32)
    hi = utils.scalar_to_ssa(cutlass.Int32(word >> 32), cutlass.Int32)
    return (query >= lo) & (query < hi)


def pack(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Two int32 as one int64."""
    return torch.stack([low, high], dim=1).view(torch.int64).squeeze(1)


VARIANTS: dict[str, tuple[Callable, Callable[[AttentionIntervals], list[torch.Tensor]]]] = {
    "package": (interval_mask, lambda x: [x.lo, x.hi]),
    "own": (own_mask, lambda x: [x.hi]),
    "packed": (packed_mask, lambda x: [pack(x.lo, x.hi - x.lo)]),
    "packed-signed": (packed_signed_mask, lambda x: [pack(x.lo, x.hi)]),
}
