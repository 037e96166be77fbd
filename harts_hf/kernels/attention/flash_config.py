"""Lets FA4's block-sparse backward at head dim 256 take the tiles of its dense one.

FA4 keeps blocks of 64 keys there, for lists that FlexAttention makes, with one stage of queries in flight. Our lists
have any number of keys a block, so the dense configuration fits: 48 keys, two stages.
"""

import functools
import logging
from types import ModuleType
from typing import Any

_logger = logging.getLogger(__name__)
_FUNCTION = "_tile_size_bwd_sm90"
_DIMS = (256, 256)
DENSE_TILE, SPARSE_TILE = (64, 48), (64, 64)


class DenseTile(int):
    """Queries of a sparse block (as an int) whose lists are made for the tiles of the dense backward."""


@functools.cache
def backward_tile(interface: ModuleType) -> tuple[int, int]:
    """(queries, keys) of a block of the backward at head dim 256: the dense tile where this FA4
    (``flash_attn.cute.interface``) has it and can be made to take it; else the tile that it keeps for block lists.
    """
    choose = getattr(interface, _FUNCTION, None)
    try:
        _install(interface)
        found = getattr(interface, _FUNCTION)(*_DIMS, False, False, sparse_block_size_q=DenseTile(DENSE_TILE[0]))
        if (found.m_block_size, found.n_block_size) == DENSE_TILE:
            return DENSE_TILE
        reason = f"its dense tile is {found.m_block_size} x {found.n_block_size}"
    except Exception as error:  # of a function that is not ours
        reason = f"its choice of tiles is another function: {error!r}"
    if choose is not None:
        setattr(interface, _FUNCTION, choose)
    _logger.info("the backward at head dim 256 runs on the tiles that FA4 keeps for block lists: %s", reason)
    return SPARSE_TILE


def marked(block_size: tuple[int, int]) -> tuple[int, int]:
    """The block size of lists as FA4 is to be given it."""
    return (DenseTile(block_size[0]), block_size[1]) if block_size == DENSE_TILE else block_size


def _install(interface: ModuleType) -> None:
    """From now on block-sparse backwards whose block size is a :class:`DenseTile` take the dense tiles; others do not
    change.
    """
    choose = getattr(interface, _FUNCTION)

    @functools.wraps(choose)
    def tile_size(*args: Any, **kwargs: Any) -> Any:
        args = tuple(None if isinstance(x, DenseTile) else x for x in args)
        kwargs = {name: None if isinstance(x, DenseTile) else x for name, x in kwargs.items()}
        return choose(*args, **kwargs)

    setattr(interface, _FUNCTION, tile_size)
