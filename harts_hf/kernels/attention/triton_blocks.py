# ruff: noqa: ANN001, ANN202 -- Triton reads a kernel's annotations as its own types
# mypy: disallow-untyped-defs=False
"""Block lists in Triton: two launches for the lists by query, one for those by key, no pass over pairs or tiles.

A program takes one block of one side and walks the blocks of the other in order, appending full and partial ones. The
result equals :func:`harts_hf.kernels.attention.flash_blocks.lists_by_torch` entry for entry.
"""

import torch
import triton
import triton.language as tl

from harts_hf.batch import AttentionIntervals

_BLOCK = 512  # blocks of the other side that a program looks at together
# Triton would compile anew for sizes that 16 divides, and make a size of 1 a constant, which has no dtype.
_SIZES = ["num_queries", "num_keys", "rows", "columns", "blocks_k"]


def build_lists(
    intervals: AttentionIntervals, num_queries: int, block_size: tuple[int, int], *, by_key: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``partial_count, partial_index, full_count, full_index`` as of
    :class:`harts_hf.kernels.attention.flash_blocks.BlockLists`, but counts ``[A]`` and indices ``[A, B]``.
    """
    block_q, block_k = block_size
    lo, hi = intervals.lo, intervals.hi
    blocks_q, blocks_k = triton.cdiv(num_queries, block_q), triton.cdiv(len(lo), block_k)
    rows, columns = (blocks_k, blocks_q) if by_key else (blocks_q, blocks_k)
    counts = torch.empty(2, rows, dtype=torch.int32, device=lo.device)
    indices = torch.empty(2, rows, columns, dtype=torch.int32, device=lo.device)
    sizes = {"BLOCK_Q": block_q, "BLOCK_K": block_k, "PADDED_K": triton.next_power_of_2(block_k), "BLOCK": _BLOCK}
    if by_key:
        _fill_by_key[(rows,)](lo, hi, counts, indices, num_queries, len(lo), rows, columns, **sizes)
    else:
        extremes = torch.empty(4, blocks_k, dtype=torch.int32, device=lo.device)
        _extremes[(blocks_k,)](
            lo, hi, extremes, len(lo), blocks_k, BLOCK_K=block_k, PADDED_K=sizes["PADDED_K"], num_warps=1
        )
        _fill_by_query[(rows,)](
            extremes, counts, indices, num_queries, len(lo), rows, columns,
            BLOCK_Q=block_q, BLOCK_K=block_k, BLOCK=_BLOCK,
        )  # fmt: skip
    return counts[0], indices[0], counts[1], indices[1]


@triton.jit
def _ends_of_block(lo, hi, block, num_keys, BLOCK_K: tl.constexpr, PADDED_K: tl.constexpr):
    offsets = tl.arange(0, PADDED_K)
    # Places past the block, or past the last key, repeat a key of the block, so they change no extreme.
    keys = tl.minimum(block * BLOCK_K + tl.minimum(offsets, BLOCK_K - 1), num_keys - 1)
    los, his = tl.load(lo + keys), tl.load(hi + keys)
    return tl.min(los), tl.max(los), tl.min(his), tl.max(his)


@triton.jit(do_not_specialize=_SIZES)
def _extremes(lo, hi, out, num_keys, blocks_k, BLOCK_K: tl.constexpr, PADDED_K: tl.constexpr):
    block = tl.program_id(0)
    lo_min, lo_max, hi_min, hi_max = _ends_of_block(lo, hi, block, num_keys, BLOCK_K, PADDED_K)
    tl.store(out + block, lo_min)
    tl.store(out + blocks_k + block, lo_max)
    tl.store(out + 2 * blocks_k + block, hi_min)
    tl.store(out + 3 * blocks_k + block, hi_max)


@triton.jit
def _classify(first, key_block, lo_min, lo_max, hi_min, hi_max, num_queries, num_keys, BLOCK_Q: tl.constexpr,
              BLOCK_K: tl.constexpr):  # fmt: skip
    stop = tl.minimum(first + BLOCK_Q, num_queries)
    visible = (lo_min < stop) & (hi_max > first)
    inside = (key_block + 1) * BLOCK_K <= num_keys
    full = (lo_max <= first) & (hi_min >= first + BLOCK_Q) & inside & visible
    return visible, full


@triton.jit
def _append(index, found, number, count):
    """Stores the numbers of the found positions behind the ``count`` there are; the new count."""
    flags = found.to(tl.int32)
    tl.store(index + count + tl.cumsum(flags, 0) - 1, number, mask=found)
    return count + tl.sum(flags)


@triton.jit
def _finish(counts, indices, row, rows, columns, partial, full, BLOCK: tl.constexpr):
    tl.store(counts + row, partial)
    tl.store(counts + rows + row, full)
    row_start = row.to(tl.int64) * columns
    for start in range(0, columns, BLOCK):
        position = start + tl.arange(0, BLOCK)
        zero = tl.zeros([BLOCK], dtype=tl.int32)
        tl.store(indices + row_start + position, zero, mask=(position >= partial) & (position < columns))
        full_start = rows.to(tl.int64) * columns + row_start
        tl.store(indices + full_start + position, zero, mask=(position >= full) & (position < columns))


@triton.jit(do_not_specialize=_SIZES)
def _fill_by_query(extremes, counts, indices, num_queries, num_keys, rows, columns, BLOCK_Q: tl.constexpr,
                   BLOCK_K: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    partial_index = indices + row.to(tl.int64) * columns
    full_index = partial_index + rows.to(tl.int64) * columns
    num_partial, num_full = 0, 0
    for start in range(0, columns, BLOCK):
        block = start + tl.arange(0, BLOCK)
        mask = block < columns
        lo_min = tl.load(extremes + block, mask=mask, other=0)
        lo_max = tl.load(extremes + columns + block, mask=mask, other=0)
        hi_min = tl.load(extremes + 2 * columns + block, mask=mask, other=0)
        hi_max = tl.load(extremes + 3 * columns + block, mask=mask, other=0)  # 0: not visible
        visible, full = _classify(
            row * BLOCK_Q, block, lo_min, lo_max, hi_min, hi_max, num_queries, num_keys, BLOCK_Q, BLOCK_K
        )
        num_partial = _append(partial_index, visible & (full == 0) & mask, block, num_partial)
        num_full = _append(full_index, full & mask, block, num_full)
    _finish(counts, indices, row, rows, columns, num_partial, num_full, BLOCK)


@triton.jit(do_not_specialize=_SIZES)
def _fill_by_key(lo, hi, counts, indices, num_queries, num_keys, rows, columns, BLOCK_Q: tl.constexpr,
                 BLOCK_K: tl.constexpr, PADDED_K: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    lo_min, lo_max, hi_min, hi_max = _ends_of_block(lo, hi, row, num_keys, BLOCK_K, PADDED_K)
    partial_index = indices + row.to(tl.int64) * columns
    full_index = partial_index + rows.to(tl.int64) * columns
    num_partial, num_full = 0, 0
    for start in range(0, columns, BLOCK):
        block = start + tl.arange(0, BLOCK)
        mask = block < columns
        visible, full = _classify(
            block * BLOCK_Q, row, lo_min, lo_max, hi_min, hi_max, num_queries, num_keys, BLOCK_Q, BLOCK_K
        )
        num_partial = _append(partial_index, visible & (full == 0) & mask, block, num_partial)
        num_full = _append(full_index, full & mask, block, num_full)
    _finish(counts, indices, row, rows, columns, num_partial, num_full, BLOCK)
