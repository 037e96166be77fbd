"""The operations in plain PyTorch, rounded where the kernels round."""

import torch
from torch.nn import functional as F

from harts_hf.kernels.checks import wide_dtype
from harts_hf.kernels.experts.order import Order


def expand(x: torch.Tensor, order: Order) -> torch.Tensor:
    """See :func:`harts_hf.kernels.experts.api.expand`."""
    return x[order.choices // order.count]


def combine(y: torch.Tensor, order: Order) -> torch.Tensor:
    """See :func:`harts_hf.kernels.experts.api.combine`."""
    return y[order.rows].to(wide_dtype(y)).sum(1).to(y.dtype)


def weighted_swiglu(both: torch.Tensor, weights: torch.Tensor, order: Order) -> torch.Tensor:
    """See :func:`harts_hf.kernels.experts.api.weighted_swiglu`."""
    gate, up = both.to(wide_dtype(both, weights)).chunk(2, dim=-1)
    return (F.silu(gate) * up * weights.reshape(-1)[order.choices, None]).to(both.dtype)
