"""Attention block of queries by block, each over the keys that some query of the block sees.

The backward runs each block again, so neither masks nor weights of more than one block are alive at once.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from harts_hf.batch import AttentionIntervals
from harts_hf.kernels.checks import exact_backward, wide_dtype

# Small enough to skip much of what a block cannot see (a chain of 1,024 rows: 1.4 times as fast as in one block).
_QUERY_BLOCK = 256


def tree_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, intervals: AttentionIntervals, *, scale: float
) -> torch.Tensor:
    """See :func:`harts_hf.kernels.attention.api.tree_attention`."""
    return _TreeAttention.apply(query, key, value, intervals, scale).transpose(1, 2).contiguous()


def _blocks(intervals: AttentionIntervals, num_rows: int) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """For each block of rows: the rows, the keys ``[S]`` that any of them sees, and the mask ``[rows, S]``."""
    for start in range(0, num_rows, _QUERY_BLOCK):
        stop = min(start + _QUERY_BLOCK, num_rows)
        keys = ((intervals.lo < stop) & (intervals.hi > start)).nonzero().squeeze(1)
        row = torch.arange(start, stop, device=keys.device)[:, None]
        mask = (intervals.lo[keys] <= row) & (row < intervals.hi[keys])
        yield slice(start, stop), keys, mask


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    dim = v.shape[3]
    if q.device.type == "cpu" and q.shape[3] > dim:
        # An MLA's values are narrower than its keys. PyTorch's blockwise CPU kernel wants one dim; without it the
        # weights of all heads for the whole block exist, several times over in the backward.
        v = pad(v, (0, q.shape[3] - dim))
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out[..., :dim]


class _TreeAttention(torch.autograd.Function):
    """``[1, Hq, N, Dk]``, ``[1, Hk, E + N, Dk]``, ``[1, Hk, E + N, Dv]`` -> ``[1, Hq, N, Dv]``."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        intervals: AttentionIntervals,
        scale: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.intervals, ctx.scale = intervals, scale
        out = query.new_empty(*query.shape[:3], value.shape[3])
        with torch.autocast(query.device.type, enabled=False):
            for rows, keys, mask in _blocks(intervals, query.shape[2]):
                k, v = key.index_select(2, keys), value.index_select(2, keys)
                out[:, :, rows] = _attend(query[:, :, rows], k, v, mask, scale)
        return out

    @staticmethod
    @exact_backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        dtype = wide_dtype(query)
        grad_query = torch.empty_like(query)
        # Keys are summed over blocks of queries in the wide dtype and rounded once.
        grad_key, grad_value = torch.zeros_like(key, dtype=dtype), torch.zeros_like(value, dtype=dtype)
        for rows, keys, mask in _blocks(ctx.intervals, query.shape[2]):
            parts = query[:, :, rows], key.index_select(2, keys), value.index_select(2, keys)
            with torch.enable_grad(), torch.autocast(query.device.type, enabled=False):
                q, k, v = (part.detach().requires_grad_() for part in parts)
                out = _attend(q, k, v, mask, ctx.scale)
            grad_query[:, :, rows], grad_k, grad_v = torch.autograd.grad(out, (q, k, v), grad[:, :, rows])
            grad_key[:, :, keys] += grad_k
            grad_value[:, :, keys] += grad_v
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None
