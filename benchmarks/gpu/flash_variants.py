"""Other ways to call FlashAttention-4, to be measured beside the package's own (``package``)."""

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import cutlass
import cutlass.cute as cute
from flash_attn.cute import interface, utils
from flash_config import DenseTile, install

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
    "dense-tiles": ("256",),  # the backward's tiles of FA4 without block lists: see flash_config.py
    "tall": ("128",),
    "fine": ("128",),
}
_BLOCKS = {
    "narrow": {(256, 256): ((128, 64), (64, 64))},
    "dense-tiles": {(256, 256): ((128, 80), (64, 48))},
    "tall": {(128, 128): ((128, 128), (80, 128))},
    "fine": {(128, 128): ((128, 128), (64, 128))},
}


def as_dense(as_flash):
    """``flash._as_flash``, with the mark on lists for the backward's tiles."""

    def marked(lists):
        queries, keys = lists.block_size
        found = as_flash(lists)
        return found._replace(block_size=(DenseTile(queries), keys)) if keys == 48 else found

    return marked


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
        elif variant == "dense-tiles":
            install(interface)
            changes.enter_context(mock.patch.object(flash, "_as_flash", as_dense(flash._as_flash)))
        changes.enter_context(mock.patch.dict(flash.TILES, _BLOCKS.get(variant, {})))
        yield
