# ruff: noqa: ANN001, ANN202 -- Triton reads a kernel's annotations as its own types
# mypy: disallow-untyped-defs=False
"""Experts' copies, sums and gates in Triton, forward and backward, without atomics; a program holds whole rows."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from harts_hf.kernels.experts.order import Order

_TILE = 2048  # elements of a tile of gates, at least one row


def expand(x: torch.Tensor, order: Order) -> torch.Tensor:
    """See :func:`harts_hf.kernels.experts.api.expand`.

    Raises:
        ValueError: float64, which these kernels would sum in float32.
    """
    out: torch.Tensor = _Expand.apply(_checked(x), order)
    return out


def combine(y: torch.Tensor, order: Order) -> torch.Tensor:
    """See :func:`harts_hf.kernels.experts.api.combine`.

    Raises:
        ValueError: float64, which these kernels would sum in float32.
    """
    out: torch.Tensor = _Combine.apply(_checked(y), order)
    return out


def weighted_swiglu(both: torch.Tensor, weights: torch.Tensor, order: Order) -> torch.Tensor:
    """See :func:`harts_hf.kernels.experts.api.weighted_swiglu`.

    Raises:
        ValueError: float64, which these kernels would compute in float32.
    """
    out: torch.Tensor = _WeightedSwiGLU.apply(_checked(both), weights, order)
    return out


def _checked(x: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.float64:
        raise ValueError("expected at most float32, got float64: use the reference backend")
    return x


def _copies(x: torch.Tensor, order: Order) -> torch.Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty(len(order.choices), x.shape[1], dtype=x.dtype, device=x.device)
    if out.numel():
        _fused_expand[(len(out),)](
            x, order.choices, out, x.stride(0), K=order.count, D=x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1])
        )
    return out


def _sums(y: torch.Tensor, order: Order) -> torch.Tensor:
    y = y if y.stride(-1) == 1 else y.contiguous()
    out = torch.empty(len(order.rows), y.shape[1], dtype=y.dtype, device=y.device)
    if out.numel():
        _fused_combine[(len(out),)](
            y, order.rows, out, y.stride(0), K=order.count, D=y.shape[1], BLOCK=triton.next_power_of_2(y.shape[1])
        )
    return out


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: Order) -> torch.Tensor:
        ctx.order = order
        return _copies(x, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sums(grad, ctx.order), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, order: Order) -> torch.Tensor:
        ctx.order = order
        return _sums(y, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _copies(grad, ctx.order), None


class _WeightedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: torch.Tensor, weights: torch.Tensor, order: Order) -> torch.Tensor:
        both, weights = both.contiguous(), weights.contiguous()
        ctx.save_for_backward(both, weights)
        ctx.order = order
        out = torch.empty(len(both), both.shape[1] // 2, dtype=both.dtype, device=both.device)
        if out.numel():
            tiling = _tiling(out)
            _fused_weighted_swiglu[(triton.cdiv(len(out), tiling["ROWS"]),)](
                both, weights, order.choices, out, len(out), **tiling
            )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        both, weights = ctx.saved_tensors
        grad = grad.contiguous()
        d_both, d_weights = torch.empty_like(both), torch.empty_like(weights)
        if grad.numel():
            tiling = _tiling(grad)
            _fused_weighted_swiglu_backward[(triton.cdiv(len(grad), tiling["ROWS"]),)](
                both, weights, ctx.order.choices, grad, d_both, d_weights, len(grad), **tiling
            )
        return d_both, d_weights, None


def _tiling(rows: torch.Tensor) -> dict[str, int]:
    block = triton.next_power_of_2(rows.shape[1])
    return {"D": rows.shape[1], "BLOCK": block, "ROWS": max(1, _TILE // block)}


@triton.jit
def _fused_expand(x, choices, out, stride, K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(choices + row) // K
    cols = tl.arange(0, BLOCK)
    value = tl.load(x + token * stride + cols, mask=cols < D, other=0.0)
    tl.store(out + row * D + cols, value, mask=cols < D)


@triton.jit
def _fused_combine(y, rows, out, stride, K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for choice in tl.static_range(K):
        row = tl.load(rows + token * K + choice).to(tl.int64)
        total += tl.load(y + row * stride + cols, mask=cols < D, other=0.0).to(tl.float32)
    tl.store(out + token * D + cols, total.to(out.dtype.element_ty), mask=cols < D)


@triton.jit
def _fused_weighted_swiglu(
    both, weights, choices, out, num_rows, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (cols < D)[None, :]
    choice = tl.load(choices + rows, mask=rows < num_rows, other=0)
    weight = tl.load(weights + choice, mask=rows < num_rows, other=0.0).to(tl.float32)
    at = both + rows[:, None] * 2 * D + cols[None, :]
    z = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(at + D, mask=mask, other=0.0).to(tl.float32)
    value = z * tl.sigmoid(z) * u * weight[:, None]
    tl.store(out + rows[:, None] * D + cols[None, :], value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _fused_weighted_swiglu_backward(
    both,
    weights,
    choices,
    grad,
    d_both,
    d_weights,
    num_rows,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (cols < D)[None, :]
    choice = tl.load(choices + rows, mask=rows < num_rows, other=0)
    weight = tl.load(weights + choice, mask=rows < num_rows, other=0.0).to(tl.float32)
    at = rows[:, None] * 2 * D + cols[None, :]
    z = tl.load(both + at, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(both + at + D, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(grad + rows[:, None] * D + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    open = tl.sigmoid(z)
    d_weight = tl.sum(g * z * open * u, 1)
    tl.store(d_weights + choice, d_weight.to(d_weights.dtype.element_ty), mask=rows < num_rows)
    g = g * weight[:, None]
    tl.store(d_both + at + D, (g * z * open).to(d_both.dtype.element_ty), mask=mask)
    d_z = g * u * open * (1.0 + z * (1.0 - open))
    tl.store(d_both + at, d_z.to(d_both.dtype.element_ty), mask=mask)
