"""Other ways to call FlashAttention-4, to be measured beside the package's own (``package``)."""

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from flash_attn.cute import interface

from harts_hf.kernels.attention import flash

# The head dims for which a variant is timed; below, the blocks (forward, backward) of some.
VARIANTS = {
    "unpacked": ("128", "256"),  # FA4's forward puts the query heads of a key head into one tile unless told not to
    "narrow": ("256",),
    "sparse-tiles": ("256",),  # the backward's tiles that FA4 keeps for block lists: see flash_config.py
    "coarse": ("128",),
}
_BLOCKS = {
    "narrow": {(256, 256): ((128, 64), (64, 48))},
    "sparse-tiles": {(256, 256): ((128, 80), (64, 64))},
    "coarse": {(128, 128): ((128, 128), (128, 128))},
}


@contextmanager
def use(variant: str) -> Iterator[None]:
    """Lets the package run FA4 so."""
    with ExitStack() as changes:
        if variant == "unpacked":
            call = functools.partial(interface.flash_attn_func, pack_gqa=False)
            changes.enter_context(mock.patch.object(interface, "flash_attn_func", call))
        changes.enter_context(mock.patch.dict(flash.TILES, _BLOCKS.get(variant, {})))
        yield
