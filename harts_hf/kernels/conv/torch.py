"""The convolution tap by tap, so that no ``[N, W, D]`` tensor is kept for the backward."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from harts_hf.batch import ConvTable
from harts_hf.kernels.checks import wide_dtype
from harts_hf.kernels.gather.torch import add_round_, rounds, take_rows


def tree_causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, table: ConvTable, *, silu: bool
) -> torch.Tensor:
    """See :func:`harts_hf.kernels.conv.api.tree_causal_conv1d`."""
    dtype = wide_dtype(x, weight, bias)
    with torch.autocast(x.device.type, enabled=False):
        y = _TreeConv.apply(x, weight.to(dtype), table)
        if bias is not None:
            y = y + bias.to(dtype)
        return (F.silu(y) if silu else y).to(x.dtype)


class _TreeConv(torch.autograd.Function):
    """``[E + N, D]``, weight ``[D, W]`` in the wide dtype -> ``[N, D]`` in the wide dtype."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, table: ConvTable) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.table = table
        taps = weight.T.contiguous()
        y = weight.new_zeros(len(table.ancestors), x.shape[1])
        for tap, rows in zip(taps, table.ancestors.unbind(1), strict=True):
            y.addcmul_(take_rows(x, rows).to(y.dtype), tap)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors
        table, grad = ctx.table, grad.contiguous()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            taps = weight.T.contiguous()
            grad_x = grad.new_zeros(x.shape)
            for turn, rows, positions in rounds(table.gather):
                part = grad.index_select(0, positions // table.width) * taps.index_select(0, positions % table.width)
                add_round_(grad_x, turn, rows, part)
            grad_x = grad_x.to(x.dtype)
        if ctx.needs_input_grad[1]:
            columns = [(take_rows(x, rows).to(grad.dtype) * grad).sum(dim=0) for rows in table.ancestors.unbind(1)]
            grad_weight = torch.stack(columns, dim=1)
        return grad_x, grad_weight, None
