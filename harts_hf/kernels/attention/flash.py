"""FlashAttention-4 (CuTe) on a tree: its kernels called with block lists built from the intervals.

Forward and backward have lists of their own, since their tiles differ. On Hopper the backward is not bitwise
reproducible (FA4 has no deterministic block-sparse backward there): two runs differ in dQ, and with grouped heads in
dK and dV too. ``deterministic=True`` selects the "flex" backend.
"""

import functools
from typing import Any

import torch

from harts_hf.batch import AttentionIntervals
from harts_hf.kernels.attention.flash_blocks import BlockLists, block_lists
from harts_hf.kernels.attention.flash_config import DENSE_TILE, backward_tile, marked
from harts_hf.kernels.caching import kept_with_table

# (head dim of q and k, of v) -> (queries, keys) of a block, forward and backward: FA4's own tiles on Hopper.
TILES = {
    (128, 128): ((128, 128), (64, 128)),
    (192, 128): ((128, 128), (64, 96)),
    (256, 256): ((128, 80), DENSE_TILE),  # where this FA4 has it: see flash_config
}


@functools.cache
def unavailable_because() -> str | None:
    """Why FA4 cannot run here, None where it can."""
    if torch.cuda.get_device_capability()[0] != 9:
        return "the block sizes are those of Hopper GPUs"
    try:
        import flash_attn.cute.interface  # noqa: F401
    except ImportError as error:
        return f"flash-attn-4 cannot be imported: {error}"
    return None


def unsupported_because(query: torch.Tensor, value: torch.Tensor) -> str | None:
    """Why these tensors (``[1, H, rows, D]``) cannot be handled, None if they can."""
    dims = (query.shape[3], value.shape[3])
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {query.dtype}"
    if dims not in TILES:
        return f"head dims {dims} are not among {sorted(TILES)}"
    return unavailable_because()


def tree_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, intervals: AttentionIntervals, *, scale: float
) -> torch.Tensor:
    """See :func:`harts_hf.kernels.attention.api.tree_attention`."""
    reason = unsupported_because(query, value)
    if reason:
        raise ValueError(f"the flash backend cannot run here: {reason}")
    from flash_attn.cute import interface

    num_queries = query.shape[2]
    tile, tile_backward = tiles_of(query.shape[3], value.shape[3])
    lists = block_lists(intervals, num_queries, tile, by_key=False)
    lists_backward = block_lists(intervals, num_queries, tile_backward, by_key=True)
    out, _ = interface.flash_attn_func(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        softmax_scale=scale,
        **mask_of(intervals),
        block_sparse_tensors=_as_flash(lists),
        block_sparse_tensors_bwd=_as_flash(lists_backward),
    )
    return out


def tiles_of(head_dim: int, head_dim_v: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """:data:`TILES` as the installed FA4 can have them."""
    from flash_attn.cute import interface

    tile, tile_backward = TILES[head_dim, head_dim_v]
    return tile, backward_tile(interface) if tile_backward == DENSE_TILE else tile_backward


def _as_flash(lists: BlockLists) -> Any:
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    return BlockSparseTensorsTorch(
        mask_block_cnt=lists.partial_count,
        mask_block_idx=lists.partial_index,
        full_block_cnt=lists.full_count,
        full_block_idx=lists.full_index,
        block_size=marked(lists.block_size),
    )


def mask_of(intervals: AttentionIntervals) -> dict[str, Any]:
    """FA4's arguments for the mask of partial tiles."""
    from harts_hf.kernels.attention.flash_mask import interval_mask

    return {"mask_mod": interval_mask, "aux_scalars": (_address(intervals),)}


@kept_with_table
def _address(intervals: AttentionIntervals) -> Any:
    from harts_hf.kernels.attention.flash_mask import address_of

    words = pack_intervals(intervals, padding=max(tile[1] for tiles in TILES.values() for tile in tiles))
    address = address_of(words)
    # FA4's backward reads the words again and knows only their address: they live as long as that does.
    address.words = words
    return address


def pack_intervals(intervals: AttentionIntervals, *, padding: int) -> torch.Tensor:
    """``lo | length << 32`` for each key, and ``padding`` zeros: ``[E + N + padding]`` int64.

    A row is visible if and only if, as unsigned 32-bit numbers, ``row - lo < length``; 0 where ``hi`` is below ``lo``.
    """
    length = (intervals.hi - intervals.lo).clamp_min(0)
    words = torch.stack([intervals.lo, length], dim=1).view(torch.int64)[:, 0]
    return torch.nn.functional.pad(words, (0, padding))
