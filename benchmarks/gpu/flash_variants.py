"""Other ways to call FlashAttention-4, to be measured beside the package's own (``package``)."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import cutlass
import cutlass.cute as cute
from flash_attn.cute import interface, utils

from harts_hf.kernels.attention import flash


@cute.jit
def two_loads_mask(batch, head, query, key, seqlen_info, aux_tensors):
    """``lo`` and ``hi`` from two tensors."""
    lo = utils.scalar_to_ssa(aux_tensors[0][key[0]], cutlass.Int32)
    hi = utils.scalar_to_ssa(aux_tensors[1][key[0]], cutlass.Int32)
    return (query >= lo) & (query < hi)


# The head dims for which a variant is timed.
VARIANTS = {
    "two-loads": ("128", "192/128", "256"),
    "unpacked": ("128", "256"),  # FA4's forward puts the query heads of a key head into one tile unless told not to
    "narrow": ("256",),  # forward tiles of 64 keys
}


@contextmanager
def use(variant: str) -> Iterator[None]:
    """Lets the package run FA4 so."""
    if variant == "two-loads":
        change = mock.patch.object(
            flash, "mask_of", lambda x: {"mask_mod": two_loads_mask, "aux_tensors": [x.lo, x.hi]}
        )
    elif variant == "unpacked":
        call = functools.partial(interface.flash_attn_func, pack_gqa=False)
        change = mock.patch.object(interface, "flash_attn_func", call)
    elif variant == "narrow":
        change = mock.patch.dict(flash.TILES, {(256, 256): ((128, 64), flash.TILES[256, 256][1])})
    else:
        change = mock.patch.object(flash, "TILES", flash.TILES)
    with change:
        yield
