"""Other ways to write FlashAttention-4's mask of partial tiles, to be measured beside the package's own.

Each entry of ``VARIANTS`` gives FA4's arguments for intervals over ``N`` queries and ``E + N`` keys; ``package`` is
what the package runs.
"""

from collections.abc import Callable
from typing import Any

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


@cute.jit
def pointer_mask(batch, head, query, key, seqlen_info, aux_tensors, aux_scalars):
    """``packed_mask`` on an address instead of a tensor, for which FA4 does not divide every index by the length.

    The words must reach to the end of the last block of keys, and whoever calls keeps them alive.
    """
    pointer = cute.make_ptr(cutlass.Int64, aux_scalars[0], cute.AddressSpace.gmem, assumed_align=8)
    word = cute.make_tensor(pointer, cute.make_layout(1 << 30))[key[0]]
    lo = utils.scalar_to_ssa(cutlass.Int32(word), cutlass.Int32)
    length = utils.scalar_to_ssa(cutlass.Uint32(cutlass.Int32(word >> 32)), cutlass.Uint32)
    return (query - lo).to(cutlass.Uint32) < length


def pack(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Two int32 as one int64."""
    return torch.stack([low, high], dim=1).view(torch.int64).squeeze(1)


_alive: list[torch.Tensor] = []


def _address(x: AttentionIntervals) -> dict[str, Any]:
    words = torch.nn.functional.pad(pack(x.lo, x.hi - x.lo), (0, 256))
    _alive.append(words)
    return {"mask_mod": pointer_mask, "aux_scalars": (cutlass.Int64(words.data_ptr()),)}


# FA4's arguments for the mask.
VARIANTS: dict[str, Callable[[AttentionIntervals], dict[str, Any]]] = {
    "package": lambda x: {"mask_mod": interval_mask, "aux_tensors": [x.lo, x.hi]},
    "own": lambda x: {"mask_mod": own_mask, "aux_tensors": [x.hi]},
    "packed": lambda x: {"mask_mod": packed_mask, "aux_tensors": [pack(x.lo, x.hi - x.lo)]},
    "packed-signed": lambda x: {"mask_mod": packed_signed_mask, "aux_tensors": [pack(x.lo, x.hi)]},
    "pointer": _address,
}
