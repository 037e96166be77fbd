# ruff: noqa: ANN001, ANN202 -- Triton reads a kernel's annotations as its own types
# mypy: disallow-untyped-defs=False
"""Row gather in Triton; the backward sums each row's positions in ascending order, in fp32, without atomics."""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from harts_hf.batch import GatherIndex

_BLOCK = 2048


def gather_rows(x: torch.Tensor, table: GatherIndex) -> torch.Tensor:
    """See :func:`harts_hf.kernels.gather.api.gather_rows`.

    Raises:
        ValueError: float64, which these kernels would sum in float32.
    """
    if x.dtype == torch.float64:
        raise ValueError("expected at most float32, got float64: use the torch backend")
    return _GatherRows.apply(x, table)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, table: GatherIndex) -> torch.Tensor:
        ctx.table, ctx.shape = table, x.shape
        return take_rows(x, table.index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return sum_positions(grad, ctx.table.ptr, ctx.table.positions).view(ctx.shape), None


def take_rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``x[index]`` along the first dimension, zeros where ``index`` is -1: ``[P, ...]``, contiguous."""
    out = torch.empty(len(index), *x.shape[1:], dtype=x.dtype, device=x.device)
    if out.numel() == 0 or x.numel() == 0:  # without rows every position reads zeros
        return out.zero_()
    size = math.prod(x.shape[1:])
    rows = x if x[:1].is_contiguous() else x.contiguous()
    block = min(_BLOCK, triton.next_power_of_2(size))
    _take[(len(index), triton.cdiv(size, block))](rows, index, out, rows.stride(0), SIZE=size, BLOCK=block)
    return out


def sum_positions(grad: torch.Tensor, ptr: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """``[R, D]`` in the dtype of ``grad``: for each row the fp32 sum of ``grad`` ``[P, ...]`` over its positions."""
    grad = grad.reshape(len(grad), -1).contiguous()
    num_rows, size = len(ptr) - 1, grad.shape[1]
    out = torch.empty(num_rows, size, dtype=grad.dtype, device=grad.device)
    if out.numel() == 0:
        return out
    block = min(_BLOCK, triton.next_power_of_2(size))
    _sum_positions[(num_rows, triton.cdiv(size, block))](grad, ptr, positions, out, SIZE=size, BLOCK=block)
    return out


@triton.jit
def _take(x, index, out, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    position = tl.program_id(0).to(tl.int64)
    row = tl.load(index + position)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    value = tl.load(x + row * stride + columns, mask=mask & (row >= 0), other=0.0)
    tl.store(out + position * SIZE + columns, value, mask=mask)


@triton.jit
def _sum_positions(grad, ptr, positions, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    begin, end = tl.load(ptr + row), tl.load(ptr + row + 1)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for entry in range(begin, end):
        position = tl.load(positions + entry)
        total += tl.load(grad + position * SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + columns, total.to(out.dtype.element_ty), mask=mask)
