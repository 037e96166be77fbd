"""Attention with the whole mask and the whole score matrix."""

import torch

from harts_hf.batch import AttentionIntervals
from harts_hf.kernels.checks import wide_dtype


def tree_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, intervals: AttentionIntervals, *, scale: float
) -> torch.Tensor:
    """See :func:`harts_hf.kernels.attention.api.tree_attention`."""
    dtype, groups = wide_dtype(query), query.shape[1] // key.shape[1]
    row = torch.arange(query.shape[2], device=query.device)[:, None]
    visible = (intervals.lo <= row) & (row < intervals.hi)  # [N, E + N]
    key, value = (x.to(dtype).repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query.to(dtype) @ key.transpose(-1, -2) * scale
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return (weights @ value).to(query.dtype).transpose(1, 2).contiguous()
