"""FlexAttention on a tree, compiled once for all trees: the fallback where FA4 is missing, and deterministic.

The block mask comes from the intervals' extremes, not from ``create_block_mask``, which would visit every pair.
"""

import functools
from collections.abc import Callable

import torch
import torch._dynamo.config
import torch.fx.experimental._config
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from harts_hf.batch import AttentionIntervals
from harts_hf.kernels.attention.flash_blocks import block_lists
from harts_hf.kernels.caching import kept_with_table

_TILE = (128, 128)
# ROWS_GUARANTEED_SAFE is not among them: it is safe only where every row sees a key in the first tile that it visits.
# Rows of a second tree, or of a branch whose block the trunk's does not meet, would be NaN.
_OPTIONS = {"BACKEND": "TRITON"}  # not the decoding kernel for short parts: one more to compile, with other bits
# PyTorch's own choice for float32 takes more shared memory than Hopper has at a head dim of 192.
_FLOAT32_OPTIONS = {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32, "fwd_num_stages": 2, "fwd_num_warps": 4}
_MOST_COMPILATIONS = 64


def tree_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, intervals: AttentionIntervals, *, scale: float
) -> torch.Tensor:
    """See :func:`harts_hf.kernels.attention.api.tree_attention`."""
    # Without duck shapes, as many keys as queries are no other code than more keys; a model needs two compilations for
    # each dtype and pair of head dims, with gradients and without, and a process may have several models.
    with (
        torch.fx.experimental._config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        torch._dynamo.config.patch(recompile_limit=_MOST_COMPILATIONS),
    ):
        out = _compiled()(
            query,
            key,
            value,
            block_mask=block_mask(intervals, query.shape[2]),
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
            kernel_options=_OPTIONS | (_FLOAT32_OPTIONS if query.dtype == torch.float32 else {}),
        )
    return out.transpose(1, 2).contiguous()


@kept_with_table
def block_mask(intervals: AttentionIntervals, num_queries: int) -> BlockMask:
    """The block mask of ``intervals``, kept as long as they live."""
    by_query, by_key = (block_lists(intervals, num_queries, _TILE, by_key=flag) for flag in (False, True))
    # Both directions are given: from_kv_blocks would derive the second from the first through a dense table.
    return BlockMask(
        seq_lengths=(num_queries, len(intervals.lo)),
        kv_num_blocks=_two_or_more(by_query.partial_count),
        kv_indices=_two_or_more(by_query.partial_index),
        full_kv_num_blocks=_two_or_more(by_query.full_count),
        full_kv_indices=_two_or_more(by_query.full_index),
        q_num_blocks=_two_or_more(by_key.partial_count),
        q_indices=_two_or_more(by_key.partial_index),
        full_q_num_blocks=_two_or_more(by_key.full_count),
        full_q_indices=_two_or_more(by_key.full_index),
        BLOCK_SIZE=_TILE,
        mask_mod=_mask_mod(intervals.lo, intervals.hi),
    )


def _two_or_more(blocks: torch.Tensor) -> torch.Tensor:
    """A copy of counts ``[1, 1, A]`` or indices ``[1, 1, A, B]``, with zeros for a second block where there is one.

    PyTorch compiles anew for a size of 1, and for a tensor that is no view; kernels look at no block past the rows.
    """
    return torch.nn.functional.pad(blocks, [x for size in reversed(blocks.shape[2:]) for x in (0, max(0, 2 - size))])


def _mask_mod(lo: torch.Tensor, hi: torch.Tensor) -> Callable[..., torch.Tensor]:
    # Tensors, not numbers, so that another tree is other data and not other code.
    def visible(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (lo[key] <= query) & (query < hi[key])

    return visible


@functools.cache
def _compiled() -> Callable[..., torch.Tensor]:
    # As one graph, since past the limit of compilations PyTorch would otherwise run the whole square of scores.
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)
