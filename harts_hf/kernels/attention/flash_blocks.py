"""Which tiles of queries and keys hold visible pairs, from the intervals alone, on their device.

A tile's keys are summed up by the extremes of their interval ends. "Full" is exact; "visible" is exact for own keys
(those of a block begin no later than the block's own rows, so the farthest-reaching one decides) and may name a tile
too many for handed keys, which costs its time and changes nothing.
"""

from dataclasses import dataclass

import torch

from harts_hf.batch import AttentionIntervals
from harts_hf.kernels.caching import kept_with_table


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockLists:
    """For each block of one side the blocks of the other that it must visit, ascending (kernels rely on it); int32.

    Attributes:
        partial_count: ``[1, 1, A]`` blocks that need the mask.
        partial_index: ``[1, 1, A, B]``, the first ``partial_count`` valid.
        full_count: ``[1, 1, A]`` blocks in which every pair is visible.
        full_index: ``[1, 1, A, B]``.
        block_size: (queries, keys) of a tile.
    """

    partial_count: torch.Tensor
    partial_index: torch.Tensor
    full_count: torch.Tensor
    full_index: torch.Tensor
    block_size: tuple[int, int]

    @property
    def num_tiles(self) -> torch.Tensor:
        """Tiles visited, a 0-d tensor."""
        return self.partial_count.sum() + self.full_count.sum()


@kept_with_table
def block_lists(
    intervals: AttentionIntervals, num_queries: int, block_size: tuple[int, int], *, by_key: bool
) -> BlockLists:
    """The lists by block of queries, or by block of keys if ``by_key``; kept as long as ``intervals`` lives."""
    if intervals.lo.is_cuda:
        from harts_hf.kernels.attention.triton_blocks import build_lists as build
    else:
        build = lists_by_torch
    found = build(intervals, num_queries, block_size, by_key=by_key)
    partial_count, partial_index, full_count, full_index = (x[None, None] for x in found)
    return BlockLists(
        partial_count=partial_count,
        partial_index=partial_index,
        full_count=full_count,
        full_index=full_index,
        block_size=block_size,
    )


def lists_by_torch(
    intervals: AttentionIntervals, num_queries: int, block_size: tuple[int, int], *, by_key: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Partial count, partial index, full count, full index: counts ``[A]``, indices ``[A, B]``, zeros past the counts.

    The readable form of what GPUs build in Triton; it looks at every pair of blocks.
    """
    visible, full = classify_tiles(intervals, num_queries, block_size)
    partial = visible & ~full
    if by_key:
        partial, full = partial.T, full.T
    return *_compact(partial), *_compact(full)


def classify_tiles(
    intervals: AttentionIntervals, num_queries: int, block_size: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[query blocks, key blocks]`` bool each: tiles with a visible pair, and tiles with no invisible one.

    A tile that reaches past the last query or key is never full: kernels mask its outside as they mask pairs.
    """
    block_q, block_k = block_size
    lo, hi = intervals.lo, intervals.hi
    num_keys, device = len(lo), lo.device
    blocks_q, blocks_k = -(-num_queries // block_q), -(-num_keys // block_k)
    missing = blocks_k * block_k - num_keys

    def extremes(ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # The last key stands in for the missing ones, so they change no extreme.
        padded = torch.cat([ends, ends[-1:].expand(missing)]).view(blocks_k, block_k)
        return padded.amin(1), padded.amax(1)

    (lo_min, lo_max), (hi_min, hi_max) = extremes(lo), extremes(hi)
    first = torch.arange(blocks_q, device=device, dtype=lo.dtype)[:, None] * block_q
    stop = (first + block_q).clamp_max(num_queries)
    visible = (lo_min < stop) & (hi_max > first)
    full = (lo_max <= first) & (hi_min >= first + block_q)
    if missing:
        full[:, -1] = False
    return visible, full


def _compact(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts ``[A]`` and ascending columns ``[A, B]`` of the true entries of each row of ``[A, B]``."""
    rows, columns = tiles.shape
    rank = tiles.cumsum(1, dtype=torch.int32)
    target = torch.where(tiles, rank - 1, columns).long()
    index = torch.zeros(rows, columns + 1, dtype=torch.int32, device=tiles.device)
    numbers = torch.arange(columns, dtype=torch.int32, device=tiles.device)
    index.scatter_(1, target, numbers.expand(rows, columns))
    return rank[:, -1].contiguous(), index[:, :columns].contiguous()
