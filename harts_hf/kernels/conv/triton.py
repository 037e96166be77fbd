# ruff: noqa: ANN001, ANN202 -- Triton reads a kernel's annotations as its own types
# mypy: disallow-untyped-defs=False
"""Depthwise causal convolution by ancestor table in Triton, forward and backward, without atomics.

Forward: each row reads its W ancestors; sums and SiLU in fp32, rounded once. Backward, first kernel: the gradient of
the pre-activation (kept in the dtype of ``x``) and partial weight gradients, one a block of rows, summed afterwards in
fp32. Second kernel: the gradient of each row is the sum over the rows that read it. Most rows are read by at most one
row per tap and go tile by tile; the few before a branch go one program a row, their readers in ascending order.

Tiles are as wide as a program's threads, so that every sum over rows stays within a thread.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from harts_hf.batch import ConvTable
from harts_hf.batch.tables import moved_together
from harts_hf.kernels.caching import kept_with_table

MAX_WIDTH = 4
_COLUMNS = 1024
_ROWS, _ROWS_BACKWARD = 8, 4
_TILES = 64  # of the first backward kernel, one after another in a program


def tree_causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, table: ConvTable, *, silu: bool
) -> torch.Tensor:
    """See :func:`harts_hf.kernels.conv.api.tree_causal_conv1d`.

    Raises:
        ValueError: more than MAX_WIDTH taps, or float64, which these kernels would compute in float32.
    """
    if x.dtype == torch.float64:
        raise ValueError("expected at most float32, got float64: use the torch backend")
    if table.width > MAX_WIDTH:
        raise ValueError(f"expected at most {MAX_WIDTH} taps, got {table.width}: use the torch backend")
    return _TreeConv.apply(x, weight, bias, table, silu)


@dataclass(frozen=True, eq=False)
class Readers:
    """``by_tap[r, w]``: the row that multiplies row r by weight w, or -1; ``heavy``: rows that a tap reads twice."""

    by_tap: torch.Tensor
    heavy: torch.Tensor


@kept_with_table
def readers(table: ConvTable) -> Readers:
    """Readers of each row, on the table's device; heavy rows have no entries in ``by_tap``.

    Found on the CPU: which rows are heavy has to be known there, and a GPU that is read is waited for.
    """
    gather, width = table.host.gather, table.width
    num_rows = gather.num_rows
    row = torch.arange(num_rows).repeat_interleave(gather.ptr.diff(), output_size=len(gather.positions))
    slot = row * width + gather.positions % width
    is_heavy = (slot.bincount(minlength=num_rows * width).view(num_rows, width) > 1).any(1)
    by_tap = torch.full((num_rows * width,), -1, dtype=torch.int32)
    light = ~is_heavy[row]
    by_tap[slot[light]] = (gather.positions[light] // width).int()
    return Readers(
        *moved_together([by_tap.view(num_rows, width), is_heavy.nonzero().squeeze(1)], table.gather.ptr.device)
    )


class _TreeConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, table: ConvTable, silu: bool
    ) -> torch.Tensor:
        x = x if x.stride(-1) == 1 else x.contiguous()
        taps = weight.T.contiguous()
        ctx.save_for_backward(x, taps, bias)
        ctx.table, ctx.silu, ctx.weight_dtype = table, silu, weight.dtype
        num_rows, channels = len(table.ancestors), x.shape[1]
        y = torch.empty(num_rows, channels, dtype=x.dtype, device=x.device)
        if y.numel():
            _forward[(triton.cdiv(num_rows, _ROWS), triton.cdiv(channels, _COLUMNS))](
                x,
                taps,
                bias,
                table.gather.index,
                y,
                num_rows,
                x.stride(0),
                D=channels,
                W=table.width,
                SILU=silu,
                ROWS=_ROWS,
                COLUMNS=_COLUMNS,
                num_warps=4,
            )
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, taps, bias = ctx.saved_tensors
        table, width = ctx.table, ctx.table.width
        num_rows, channels = dy.shape
        if dy.numel() == 0:
            d_bias = None if bias is None else torch.zeros_like(bias)
            return torch.zeros_like(x), torch.zeros_like(taps.T, dtype=ctx.weight_dtype), d_bias, None, None
        dy = dy if dy.stride(-1) == 1 else dy.contiguous()
        blocks = triton.cdiv(num_rows, _ROWS_BACKWARD * _TILES)
        d_pre = torch.empty(num_rows, channels, dtype=x.dtype, device=x.device)
        partial = torch.empty(blocks, MAX_WIDTH + 1, channels, dtype=torch.float32, device=x.device)
        column_blocks = triton.cdiv(channels, _COLUMNS)
        shape = {"D": channels, "W": width, "COLUMNS": _COLUMNS, "num_warps": 4}
        _backward_pre[(blocks, column_blocks)](
            x,
            taps,
            bias,
            table.gather.index,
            dy,
            d_pre,
            partial,
            num_rows,
            x.stride(0),
            dy.stride(0),
            SILU=ctx.silu,
            ROWS=_ROWS_BACKWARD,
            TILES=_TILES,
            **shape,
        )
        total = partial.sum(0)
        d_weight = total[:width].T.contiguous().to(ctx.weight_dtype)
        d_bias = None if bias is None else total[MAX_WIDTH].to(bias.dtype)
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        who = readers(table)
        _backward_x[(triton.cdiv(len(x), _ROWS), column_blocks)](
            d_pre, taps, who.by_tap, dx, len(x), ROWS=_ROWS, **shape
        )
        if len(who.heavy):
            gather = table.gather
            _backward_x_heavy[(len(who.heavy), column_blocks)](
                d_pre, taps, who.heavy, gather.ptr, gather.positions, dx, ROWS=_ROWS, **shape
            )
        return dx, d_weight, d_bias, None, None


@triton.jit
def _tap(x, source, stride, o_c, m_c, factor):
    """``factor * x[source]`` in fp32, ``[ROWS, COLUMNS]``, zeros where the source is -1."""
    pointers = x + source.to(tl.int64)[:, None] * stride + o_c[None, :]
    value = tl.load(pointers, mask=(source >= 0)[:, None] & m_c[None, :], other=0.0)
    return value.to(tl.float32) * factor[None, :]


@triton.jit
def _forward(
    x,
    taps,
    bias,
    ancestors,
    y,
    num_rows,
    stride_x,
    D: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    m_r, m_c = rows < num_rows, o_c < D
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for tap in tl.static_range(W):
        source = tl.load(ancestors + rows * W + tap, mask=m_r, other=-1)
        factor = tl.load(taps + tap * D + o_c, mask=m_c, other=0.0).to(tl.float32)
        total += _tap(x, source, stride_x, o_c, m_c, factor)
    if bias is not None:
        total += tl.load(bias + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    if SILU:
        total = total * tl.sigmoid(total)
    tl.store(y + rows[:, None] * D + o_c[None, :], total.to(y.dtype.element_ty), mask=m_r[:, None] & m_c[None, :])


@triton.jit
def _backward_pre(
    x,
    taps,
    bias,
    ancestors,
    dy,
    d_pre,
    partial,
    num_rows,
    stride_x,
    stride_dy,
    D: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    o_c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    m_c = o_c < D
    # Weights by distance: w0 multiplies the row itself. Four variables, since a loop cannot index them.
    w0 = tl.load(taps + (W - 1) * D + o_c, mask=m_c, other=0.0).to(tl.float32)
    w1 = tl.load(taps + (W - 2) * D + o_c, mask=m_c & (W > 1), other=0.0).to(tl.float32)
    w2 = tl.load(taps + (W - 3) * D + o_c, mask=m_c & (W > 2), other=0.0).to(tl.float32)
    w3 = tl.load(taps + (W - 4) * D + o_c, mask=m_c & (W > 3), other=0.0).to(tl.float32)
    ones = tl.full([COLUMNS], 1.0, tl.float32)
    d0 = tl.zeros([COLUMNS], dtype=tl.float32)
    d1 = tl.zeros([COLUMNS], dtype=tl.float32)
    d2 = tl.zeros([COLUMNS], dtype=tl.float32)
    d3 = tl.zeros([COLUMNS], dtype=tl.float32)
    d_bias = tl.zeros([COLUMNS], dtype=tl.float32)
    for tile in range(TILES):
        rows = (block * TILES + tile) * ROWS + tl.arange(0, ROWS)
        m_r = rows < num_rows
        mask = m_r[:, None] & m_c[None, :]
        grad = tl.load(dy + rows[:, None] * stride_dy + o_c[None, :], mask=mask, other=0.0).to(tl.float32)
        source = ancestors + rows * W + W - 1
        x0 = _tap(x, tl.load(source, mask=m_r, other=-1), stride_x, o_c, m_c, ones)
        x1 = _tap(x, tl.load(source - 1, mask=m_r & (W > 1), other=-1), stride_x, o_c, m_c, ones)
        x2 = _tap(x, tl.load(source - 2, mask=m_r & (W > 2), other=-1), stride_x, o_c, m_c, ones)
        x3 = _tap(x, tl.load(source - 3, mask=m_r & (W > 3), other=-1), stride_x, o_c, m_c, ones)
        if SILU:
            total = x3 * w3[None, :] + x2 * w2[None, :] + x1 * w1[None, :] + x0 * w0[None, :]
            if bias is not None:
                total += tl.load(bias + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
            gate = tl.sigmoid(total)
            grad = grad * gate * (1.0 + total * (1.0 - gate))
        tl.store(d_pre + rows[:, None] * D + o_c[None, :], grad.to(d_pre.dtype.element_ty), mask=mask)
        d0 += tl.sum(grad * x0, 0)
        d1 += tl.sum(grad * x1, 0)
        d2 += tl.sum(grad * x2, 0)
        d3 += tl.sum(grad * x3, 0)
        d_bias += tl.sum(grad, 0)
    partial += block * 5 * D + o_c
    tl.store(partial + (W - 1) * D, d0, mask=m_c)
    tl.store(partial + (W - 2) * D, d1, mask=m_c & (W > 1))
    tl.store(partial + (W - 3) * D, d2, mask=m_c & (W > 2))
    tl.store(partial + (W - 4) * D, d3, mask=m_c & (W > 3))
    tl.store(partial + 4 * D, d_bias, mask=m_c)


@triton.jit
def _backward_x(
    d_pre, taps, by_tap, dx, num_rows, D: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    m_r, m_c = rows < num_rows, o_c < D
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for tap in tl.static_range(W):
        reader = tl.load(by_tap + rows * W + tap, mask=m_r, other=-1)
        factor = tl.load(taps + tap * D + o_c, mask=m_c, other=0.0).to(tl.float32)
        total += _tap(d_pre, reader, D, o_c, m_c, factor)
    tl.store(dx + rows[:, None] * D + o_c[None, :], total.to(dx.dtype.element_ty), mask=m_r[:, None] & m_c[None, :])


@triton.jit
def _backward_x_heavy(
    d_pre,
    taps,
    heavy,
    ptr,
    positions,
    dx,
    D: tl.constexpr,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.load(heavy + tl.program_id(0))
    o_c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    m_c = o_c < D
    begin, end = tl.load(ptr + row), tl.load(ptr + row + 1)
    total = tl.zeros([COLUMNS], dtype=tl.float32)
    for first in range(begin, end, ROWS):
        entries = first + tl.arange(0, ROWS)
        position = tl.load(positions + entries, mask=entries < end, other=0)
        mask = (entries < end)[:, None] & m_c[None, :]
        grad = tl.load(d_pre + (position // W)[:, None] * D + o_c[None, :], mask=mask, other=0.0).to(tl.float32)
        factor = tl.load(taps + (position % W)[:, None] * D + o_c[None, :], mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(grad * factor, 0)
    tl.store(dx + row * D + o_c, total.to(dx.dtype.element_ty), mask=m_c)
