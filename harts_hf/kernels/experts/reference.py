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


def route(
    scores: torch.Tensor,
    bias: torch.Tensor,
    *,
    groups: int,
    kept_groups: int,
    count: int,
    normalizes: bool,
    factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`harts_hf.kernels.experts.api.route`."""
    value = scores.to(wide_dtype(scores, bias)) + bias
    of_group = value.unflatten(1, (groups, -1))
    sums = of_group.topk(2, dim=2).values.sum(2)
    kept = sums.argsort(dim=1, descending=True, stable=True)[:, :kept_groups]
    is_kept = torch.zeros_like(sums, dtype=torch.bool).scatter(1, kept, True)
    value = of_group.masked_fill(~is_kept[:, :, None], float("-inf")).flatten(1)
    chosen = value.argsort(dim=1, descending=True, stable=True)[:, :count]
    weights = scores.gather(1, chosen).to(wide_dtype(scores))
    if normalizes:
        weights = (weights / (weights.sum(1, keepdim=True) + 1e-20)).to(scores.dtype)
    return (weights * factor).to(scores.dtype), chosen
