"""Lets FA4's block-sparse backward at head dim 256 take the tiles of its dense one.

FA4 keeps blocks of 64 keys there, for lists that FlexAttention makes, with one stage of queries in flight. Our lists
have any number of keys a block, so the dense configuration fits: 48 keys, two stages.
"""

import functools
from types import ModuleType
from typing import Any

_FUNCTION = "_tile_size_bwd_sm90"


class DenseTile(int):
    """Queries of a sparse block (as an int) whose lists are made for the tiles of the dense backward."""


def can_install(interface: ModuleType) -> bool:
    """Whether this FA4 (``flash_attn.cute.interface``) chooses tiles where the known ones do."""
    return callable(getattr(interface, _FUNCTION, None))


def install(interface: ModuleType) -> None:
    """From now on block-sparse backwards whose block size is a :class:`DenseTile` take the dense tiles; others do not
    change. More than once is once.
    """
    choose = getattr(interface, _FUNCTION)
    if hasattr(choose, "__wrapped__"):
        return

    @functools.wraps(choose)
    def tile_size(*args: Any, sparse_block_size_q: int | None = None, **kwargs: Any) -> Any:
        if isinstance(sparse_block_size_q, DenseTile):
            sparse_block_size_q = None
        return choose(*args, sparse_block_size_q=sparse_block_size_q, **kwargs)

    setattr(interface, _FUNCTION, tile_size)
