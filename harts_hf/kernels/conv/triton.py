# ruff: noqa: ANN001, ANN202 -- Triton reads a kernel's annotations as its own types
# mypy: disallow-untyped-defs=False
"""Depthwise causal convolution by ancestor table in Triton, forward and backward, without atomics.

Forward: each row reads its W ancestors; sums and SiLU in fp32, rounded once. Backward, first kernel: the gradient of
the pre-activation (kept in the dtype of ``x``) and partial weight gradients, one a block of rows, summed afterwards in
fp32. Second kernel: the gradient of each row is the sum over the places that read it, in ascending order; all but a
few rows around branches are read at most W times and go tile by tile, the others one program a row.
"""

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from harts_hf.batch import ConvTable

_ROWS, _COLUMNS, _TILES = 16, 256, 16


def tree_causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, table: ConvTable, *, silu: bool
) -> torch.Tensor:
    """See :func:`harts_hf.kernels.conv.api.tree_causal_conv1d`."""
    return _TreeConv.apply(x, weight, bias, table, silu)


@dataclass(frozen=True, eq=False)
class _Readers:
    """``light[r, j]``: the j-th place that reads row r, or -1; rows with more than W places are in ``heavy`` only."""

    light: torch.Tensor
    heavy: torch.Tensor


_readers: WeakKeyDictionary[ConvTable, _Readers] = WeakKeyDictionary()


def readers(table: ConvTable) -> _Readers:
    """Readers of each row, built on the table's device on first use."""
    if table not in _readers:
        ptr, places, width = table.gather.ptr, table.gather.places, table.width
        counts = ptr.diff()
        is_heavy = counts > width
        offsets = torch.arange(width, device=ptr.device)
        entries = (ptr[:-1, None] + offsets).clamp_max(max(len(places) - 1, 0))
        valid = (offsets < counts[:, None]) & ~is_heavy[:, None]
        light = torch.where(valid, places[entries], -1)
        _readers[table] = _Readers(light.int(), is_heavy.nonzero().squeeze(1))
    return _readers[table]


class _TreeConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, table: ConvTable, silu: bool
    ) -> torch.Tensor:
        x = x if x.stride(-1) == 1 else x.contiguous()
        ctx.save_for_backward(x, weight, bias)
        ctx.table, ctx.silu = table, silu
        num_rows, channels = len(table.ancestors), x.shape[1]
        y = torch.empty(num_rows, channels, dtype=x.dtype, device=x.device)
        if y.numel() == 0:
            return y
        _forward[(triton.cdiv(num_rows, _ROWS), triton.cdiv(channels, _COLUMNS))](
            x,
            weight,
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
        )
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        table, width = ctx.table, ctx.table.width
        num_rows, channels = dy.shape
        if dy.numel() == 0:
            d_bias = None if bias is None else torch.zeros_like(bias)
            return torch.zeros_like(x), torch.zeros_like(weight), d_bias, None, None
        dy = dy if dy.stride(-1) == 1 else dy.contiguous()
        blocks = triton.cdiv(num_rows, _ROWS * _TILES)
        d_pre = torch.empty(num_rows, channels, dtype=x.dtype, device=x.device)
        partial = torch.empty(blocks, width + 1, channels, dtype=torch.float32, device=x.device)
        column_blocks = triton.cdiv(channels, _COLUMNS)
        _backward_pre[(blocks, column_blocks)](
            x,
            weight,
            bias,
            table.gather.index,
            dy,
            d_pre,
            partial,
            num_rows,
            x.stride(0),
            dy.stride(0),
            D=channels,
            W=width,
            SILU=ctx.silu,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            TILES=_TILES,
        )
        total = partial.sum(0)
        d_weight = total[:width].T.contiguous().to(weight.dtype)
        d_bias = None if bias is None else total[width].to(bias.dtype)
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        table_readers = readers(table)
        _backward_x[(triton.cdiv(len(x), _ROWS), column_blocks)](
            d_pre,
            weight,
            table_readers.light,
            dx,
            len(x),
            D=channels,
            W=width,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
        )
        if len(table_readers.heavy):
            _backward_x_heavy[(len(table_readers.heavy), column_blocks)](
                d_pre,
                weight,
                table_readers.heavy,
                table.gather.ptr,
                table.gather.places,
                dx,
                D=channels,
                W=width,
                COLUMNS=_COLUMNS,
            )
        return dx, d_weight, d_bias, None, None


@triton.jit
def _forward(
    x,
    weight,
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
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    m_r, m_c = rows < num_rows, columns < D
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for tap in tl.static_range(W):
        source = tl.load(ancestors + rows * W + tap, mask=m_r, other=-1)
        value = tl.load(
            x + source[:, None] * stride_x + columns[None, :], mask=(source >= 0)[:, None] & m_c[None, :], other=0.0
        )
        factor = tl.load(weight + columns * W + tap, mask=m_c, other=0.0).to(tl.float32)
        total += value.to(tl.float32) * factor[None, :]
    if bias is not None:
        total += tl.load(bias + columns, mask=m_c, other=0.0).to(tl.float32)[None, :]
    if SILU:
        total = total * tl.sigmoid(total)
    mask = m_r[:, None] & m_c[None, :]
    tl.store(y + rows[:, None] * D + columns[None, :], total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _backward_pre(
    x,
    weight,
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
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    m_c = columns < D
    taps = tl.arange(0, 8)
    d_weight = tl.zeros([8, COLUMNS], dtype=tl.float32)  # row W holds the bias
    for tile in range(TILES):
        rows = (tl.program_id(0).to(tl.int64) * TILES + tile) * ROWS + tl.arange(0, ROWS)
        m_r = rows < num_rows
        mask = m_r[:, None] & m_c[None, :]
        grad = tl.load(dy + rows[:, None] * stride_dy + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        if SILU:
            total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
            for tap in tl.static_range(W):
                source = tl.load(ancestors + rows * W + tap, mask=m_r, other=-1)
                value = tl.load(
                    x + source[:, None] * stride_x + columns[None, :],
                    mask=(source >= 0)[:, None] & m_c[None, :],
                    other=0.0,
                )
                factor = tl.load(weight + columns * W + tap, mask=m_c, other=0.0).to(tl.float32)
                total += value.to(tl.float32) * factor[None, :]
            if bias is not None:
                total += tl.load(bias + columns, mask=m_c, other=0.0).to(tl.float32)[None, :]
            gate = tl.sigmoid(total)
            grad = grad * gate * (1.0 + total * (1.0 - gate))
        tl.store(d_pre + rows[:, None] * D + columns[None, :], grad.to(d_pre.dtype.element_ty), mask=mask)
        for tap in tl.static_range(W):
            source = tl.load(ancestors + rows * W + tap, mask=m_r, other=-1)
            value = tl.load(
                x + source[:, None] * stride_x + columns[None, :],
                mask=(source >= 0)[:, None] & m_c[None, :],
                other=0.0,
            )
            product = tl.sum(grad * value.to(tl.float32), 0)
            d_weight += tl.where(taps[:, None] == tap, product[None, :], 0.0)
        d_weight += tl.where(taps[:, None] == W, tl.sum(grad, 0)[None, :], 0.0)
    offset = (tl.program_id(0).to(tl.int64) * (W + 1) + taps)[:, None] * D + columns[None, :]
    tl.store(partial + offset, d_weight, mask=(taps <= W)[:, None] & m_c[None, :])


@triton.jit
def _backward_x(
    d_pre, weight, light, dx, num_rows, D: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    m_r, m_c = rows < num_rows, columns < D
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for reader in tl.static_range(W):
        place = tl.load(light + rows * W + reader, mask=m_r, other=-1)
        mask = (place >= 0)[:, None] & m_c[None, :]
        row, tap = (place // W).to(tl.int64), place % W
        grad = tl.load(d_pre + row[:, None] * D + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        factor = tl.load(weight + columns[None, :] * W + tap[:, None], mask=mask, other=0.0).to(tl.float32)
        total += grad * factor
    mask = m_r[:, None] & m_c[None, :]
    tl.store(dx + rows[:, None] * D + columns[None, :], total.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def _backward_x_heavy(d_pre, weight, heavy, ptr, places, dx, D: tl.constexpr, W: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.load(heavy + tl.program_id(0))
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    m_c = columns < D
    begin, end = tl.load(ptr + row), tl.load(ptr + row + 1)
    total = tl.zeros([COLUMNS], dtype=tl.float32)
    for entry in range(begin, end):
        place = tl.load(places + entry)
        grad = tl.load(d_pre + (place // W) * D + columns, mask=m_c, other=0.0).to(tl.float32)
        factor = tl.load(weight + columns * W + place % W, mask=m_c, other=0.0).to(tl.float32)
        total += grad * factor
    tl.store(dx + row * D + columns, total.to(dx.dtype.element_ty), mask=m_c)
