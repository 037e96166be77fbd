# ruff: noqa: ANN001, ANN202 -- Triton reads a kernel's annotations as its own types
# mypy: disallow-untyped-defs=False
"""SwiGLU and KDA's decays in Triton, forward and backward, without atomics."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from harts_hf.kernels.rowwise.triton_norm import row_view

_COLUMNS = 1024
_ROWS = 4
_PROGRAMS = 264  # of a decay's backward and each block of columns


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """See :func:`harts_hf.kernels.rowwise.api.swiglu`.

    Raises:
        ValueError: float64, which these kernels would compute in float32.
    """
    _refuse_float64(gate)
    out: torch.Tensor = _SwiGLU.apply(gate, up)
    return out


def decay_gate(
    x: torch.Tensor, log_rate: torch.Tensor, bias: torch.Tensor, *, bound: float | None, dtype: torch.dtype
) -> torch.Tensor:
    """See :func:`harts_hf.kernels.rowwise.api.decay_gate`.

    Raises:
        ValueError: float64, which these kernels would compute in float32.
    """
    _refuse_float64(x)
    out: torch.Tensor = _Decay.apply(x, log_rate, bias, bound, dtype)
    return out


def _refuse_float64(x: torch.Tensor) -> None:
    if x.dtype == torch.float64:
        raise ValueError("expected at most float32, got float64: use the reference backend")


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        gates, ups = row_view(gate), row_view(up)
        out = torch.empty(gates.shape, dtype=gate.dtype, device=gate.device)
        if out.numel():
            _fused_swiglu[_grid(out)](
                gates, ups, out, *out.shape, gates.stride(0), ups.stride(0), ROWS=_ROWS, COLUMNS=_COLUMNS
            )
        return out.view(gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        gates, ups, grads = row_view(gate), row_view(up), row_view(grad)
        d_gate, d_up = (torch.empty(gates.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
        if d_up.numel():
            _fused_swiglu_backward[_grid(d_up)](
                gates, ups, grads, d_gate, d_up, *d_up.shape, gates.stride(0), ups.stride(0), grads.stride(0),
                ROWS=_ROWS, COLUMNS=_COLUMNS,
            )  # fmt: skip
        return d_gate.view(gate.shape), d_up.view(gate.shape)


class _Decay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        log_rate: torch.Tensor,
        bias: torch.Tensor,
        bound: float | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, log_rate, bias)
        ctx.bound = bound
        rows, dim = row_view(x), x.shape[-1] // len(log_rate)
        out = torch.empty(rows.shape, dtype=dtype, device=x.device)
        if out.numel():
            _fused_decay[_grid(out)](
                rows, log_rate, bias, out, *out.shape, rows.stride(0), bound or 0.0,
                DIM=dim, BOUNDED=bound is not None, ROWS=_ROWS, COLUMNS=_COLUMNS,
            )  # fmt: skip
        return out.view(*x.shape[:-1], len(log_rate), dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, log_rate, bias = ctx.saved_tensors
        rows, heads = row_view(x), len(log_rate)
        grads = row_view(grad.reshape(x.shape))
        dx = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        tiles = triton.cdiv(triton.cdiv(len(rows), _ROWS), _PROGRAMS)
        programs = triton.cdiv(len(rows), _ROWS * tiles) if tiles else 0
        # Of the bias, then of the logarithm of each channel's rate.
        partial = torch.zeros(max(1, programs), 2, x.shape[-1], dtype=torch.float32, device=x.device)
        if dx.numel():
            _fused_decay_backward[(programs, triton.cdiv(x.shape[-1], _COLUMNS))](
                rows, log_rate, bias, grads, dx, partial, *dx.shape, rows.stride(0), grads.stride(0), tiles,
                ctx.bound or 0.0, DIM=x.shape[-1] // heads, BOUNDED=ctx.bound is not None, ROWS=_ROWS,
                COLUMNS=_COLUMNS,
            )  # fmt: skip
        d_bias, d_rate = partial.sum(0)
        return (
            dx.view(x.shape),
            d_rate.view(heads, -1).sum(1).to(log_rate.dtype),
            d_bias.to(bias.dtype),
            None,
            None,
        )


def _grid(out: torch.Tensor) -> tuple[int, int]:
    return triton.cdiv(out.shape[0], _ROWS), triton.cdiv(out.shape[1], _COLUMNS)


@triton.jit
def _tile(num_rows, num_columns, first_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = first_row + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    return rows[:, None], cols[None, :], (rows < num_rows)[:, None] & (cols < num_columns)[None, :]


@triton.jit
def _fused_swiglu(
    gate, up, out, num_rows, num_columns, stride_gate, stride_up, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    rows, cols, mask = _tile(num_rows, num_columns, tl.program_id(0).to(tl.int64) * ROWS, ROWS, COLUMNS)
    z = tl.load(gate + rows * stride_gate + cols, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + rows * stride_up + cols, mask=mask, other=0.0).to(tl.float32)
    activated = (z * tl.sigmoid(z)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + rows * num_columns + cols, (activated * u).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _fused_swiglu_backward(
    gate,
    up,
    grad,
    d_gate,
    d_up,
    num_rows,
    num_columns,
    stride_gate,
    stride_up,
    stride_grad,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows, cols, mask = _tile(num_rows, num_columns, tl.program_id(0).to(tl.int64) * ROWS, ROWS, COLUMNS)
    z = tl.load(gate + rows * stride_gate + cols, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + rows * stride_up + cols, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(grad + rows * stride_grad + cols, mask=mask, other=0.0).to(tl.float32)
    open = tl.sigmoid(z)
    at = rows * num_columns + cols
    tl.store(d_up + at, (g * z * open).to(d_up.dtype.element_ty), mask=mask)
    d_z = g * u * open * (1.0 + z * (1.0 - open))
    tl.store(d_gate + at, d_z.to(d_gate.dtype.element_ty), mask=mask)


@triton.jit
def _log1p(x):
    """Exact for small x too, where ``1 + x`` rounds."""
    sum = 1.0 + x
    return tl.where(sum == 1.0, x, tl.log(sum) * (x / tl.where(sum == 1.0, 1.0, sum - 1.0)))


@triton.jit
def _fused_decay(
    x,
    log_rate,
    bias,
    out,
    num_rows,
    num_columns,
    stride_x,
    bound,
    DIM: tl.constexpr,
    BOUNDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows, cols, mask = _tile(num_rows, num_columns, tl.program_id(0).to(tl.int64) * ROWS, ROWS, COLUMNS)
    is_column = cols < num_columns
    rate = tl.exp(tl.load(log_rate + cols // DIM, mask=is_column, other=0.0).to(tl.float32))
    value = tl.load(x + rows * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
    value = value + tl.load(bias + cols, mask=is_column, other=0.0).to(tl.float32)
    if BOUNDED:
        value = bound * tl.sigmoid(rate * value)
    else:
        value = -rate * (tl.maximum(value, 0.0) + _log1p(tl.exp(-tl.abs(value))))
    tl.store(out + rows * num_columns + cols, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _fused_decay_backward(
    x,
    log_rate,
    bias,
    grad,
    dx,
    partial,
    num_rows,
    num_columns,
    stride_x,
    stride_grad,
    tiles,
    bound,
    DIM: tl.constexpr,
    BOUNDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = cols < num_columns
    rate = tl.exp(tl.load(log_rate + cols // DIM, mask=is_column, other=0.0).to(tl.float32))[None, :]
    shift = tl.load(bias + cols, mask=is_column, other=0.0).to(tl.float32)[None, :]
    d_bias = tl.zeros([COLUMNS], dtype=tl.float32)
    d_rate = tl.zeros([COLUMNS], dtype=tl.float32)
    for tile in range(tiles):
        rows, columns, mask = _tile(num_rows, num_columns, (program * tiles + tile) * ROWS, ROWS, COLUMNS)
        value = tl.load(x + rows * stride_x + columns, mask=mask, other=0.0).to(tl.float32) + shift
        g = tl.load(grad + rows * stride_grad + columns, mask=mask, other=0.0).to(tl.float32)
        if BOUNDED:
            open = tl.sigmoid(rate * value)
            slope = g * bound * open * (1.0 - open) * rate
            along = slope * value
        else:
            slope = -g * rate * tl.sigmoid(value)
            along = -g * rate * (tl.maximum(value, 0.0) + _log1p(tl.exp(-tl.abs(value))))
        tl.store(dx + rows * num_columns + columns, slope.to(dx.dtype.element_ty), mask=mask)
        d_bias += tl.sum(slope, 0)
        d_rate += tl.sum(along, 0)
    at = partial + program * 2 * num_columns + cols
    tl.store(at, d_bias, mask=is_column)
    tl.store(at + num_columns, d_rate, mask=is_column)
