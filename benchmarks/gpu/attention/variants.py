"""Other ways to call FlashAttention-4, to be measured beside the package's own."""

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from benchmarks.gpu.registry import FLASH_VARIANTS, HEAD_DIMS
from harts_hf.kernels.attention import flash


@contextmanager
def use(variant: str | None) -> Iterator[None]:
    """Lets the package run FA4 as a variant of the registry does; None is the package's own way."""
    tiles = {HEAD_DIMS[name][:2]: value for name, value in FLASH_VARIANTS.get(variant or "", {}).items() if value}
    with ExitStack() as changes:
        changes.enter_context(mock.patch.dict(flash.TILES, tiles))
        if variant == "unpacked":
            from flash_attn.cute import interface

            call = functools.partial(interface.flash_attn_func, pack_gqa=False)
            changes.enter_context(mock.patch.object(interface, "flash_attn_func", call))
        yield
