"""Other ways to call FlashAttention-4, to be measured beside the package's own (``package``)."""

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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


# The head dims for which a variant is timed; below, the blocks (forward, backward) of some.
VARIANTS = {
    "two-loads": ("128", "192/128", "256"),
    "unpacked": ("128", "256"),  # FA4's forward puts the query heads of a key head into one tile unless told not to
    "narrow": ("256",),
    "sparse-tiles": ("256",),  # FA4's own tiles for the backward with block lists: one stage of queries
    "tall": ("128",),
    "fine": ("128",),
}
_BLOCKS = {
    "narrow": {(256, 256): ((128, 64), (64, 48))},
    "sparse-tiles": {(256, 256): ((128, 80), (64, 64))},
    "tall": {(128, 128): ((128, 128), (80, 128))},
    "fine": {(128, 128): ((128, 128), (64, 128))},
}


@contextmanager
def use(variant: str) -> Iterator[None]:
    """Lets the package run FA4 so."""
    with ExitStack() as changes:
        if variant == "two-loads":
            mask = {"mask_mod": two_loads_mask}
            changes.enter_context(mock.patch.object(flash, "mask_of", lambda x: {**mask, "aux_tensors": [x.lo, x.hi]}))
        elif variant == "unpacked":
            call = functools.partial(interface.flash_attn_func, pack_gqa=False)
            changes.enter_context(mock.patch.object(interface, "flash_attn_func", call))
        elif variant == "sparse-tiles":
            changes.enter_context(mock.patch.object(flash, "_DENSE_BACKWARD", None))
        changes.enter_context(mock.patch.dict(flash.TILES, _BLOCKS.get(variant, {})))
        yield
