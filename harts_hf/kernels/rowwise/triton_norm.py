# ruff: noqa: ANN001, ANN202 -- Triton reads a kernel's annotations as its own types
# mypy: disallow-untyped-defs=False
"""RMSNorm with and without a gate in Triton, forward and backward, without atomics.

A program holds whole rows. In the backward each program goes through a run of rows and sums the weight's gradient
over them; these sums, one a program, are then summed in fp32.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

_TILE = 2048  # elements of a tile, at least one row
_PROGRAMS = 528  # of a backward: four a multiprocessor of an H200
_ACTIVATIONS = {None: 0, "sigmoid": 1, "silu": 2}


def rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor,
    *,
    eps: float,
    offset: float = 0.0,
    activation: str | None = None,
    rounds_first: bool = False,
) -> torch.Tensor:
    """See :func:`harts_hf.kernels.rowwise.api.rms_norm` and ``gated_rms_norm``.

    Raises:
        ValueError: float64, which these kernels would compute in float32.
    """
    if x.dtype == torch.float64:
        raise ValueError("expected at most float32, got float64: use the reference backend")
    out: torch.Tensor = _Norm.apply(x, gate, weight, eps, offset, _ACTIVATIONS[activation], rounds_first)
    return out


def row_view(x: torch.Tensor) -> torch.Tensor:
    """``[..., D]`` as ``[R, D]`` with neighbouring columns; a view where the rows lie evenly."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _tiling(columns: int) -> dict[str, Any]:
    block = triton.next_power_of_2(columns)
    return {
        "D": columns,
        "BLOCK": block,
        "ROWS": max(1, _TILE // block),
        "num_warps": 4 if block <= _TILE else 8,
    }


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        gate: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        offset: float,
        activation: int,
        rounds_first: bool,
    ) -> torch.Tensor:
        rows, gates = row_view(x), None if gate is None else row_view(gate)
        # Stock modules that round first multiply in the wider dtype of weight and row.
        product = torch.promote_types(x.dtype, weight.dtype) if rounds_first else torch.float32
        dtype = product if rounds_first and gate is None else x.dtype
        y = torch.empty(rows.shape, dtype=dtype, device=x.device)
        ctx.save_for_backward(x, gate, weight)
        ctx.options = {
            "eps": eps,
            "OFFSET": offset,
            "ACTIVATION": activation,
            "ROUNDS": rounds_first,
            "ROUNDS_PRODUCT": rounds_first and product == x.dtype,
        }
        if y.numel():
            tiling = _tiling(x.shape[-1])
            _fused_norm[(triton.cdiv(len(rows), tiling["ROWS"]),)](
                rows, gates, weight, y, len(rows), rows.stride(0), _stride(gates), **ctx.options, **tiling
            )
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, gate, weight = ctx.saved_tensors
        rows, gates, grads = row_view(x), None if gate is None else row_view(gate), row_view(dy)
        dx = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        d_gate = None if gate is None else torch.empty(rows.shape, dtype=gate.dtype, device=x.device)
        tiling = _tiling(x.shape[-1])
        tiles = triton.cdiv(triton.cdiv(len(rows), tiling["ROWS"]), _PROGRAMS)
        programs = triton.cdiv(len(rows), tiling["ROWS"] * tiles) if tiles else 0
        partial = torch.zeros(1, x.shape[-1], dtype=torch.float32, device=x.device)
        if programs:
            partial = torch.empty(programs, x.shape[-1], dtype=torch.float32, device=x.device)
            _fused_norm_backward[(programs,)](
                rows, gates, weight, grads, dx, d_gate, partial, len(rows), rows.stride(0), _stride(gates),
                grads.stride(0), tiles, **ctx.options, **tiling,
            )  # fmt: skip
        d_weight = partial.sum(0).to(weight.dtype) if ctx.needs_input_grad[2] else None
        return dx.view(x.shape), None if d_gate is None else d_gate.view(x.shape), d_weight, *(None,) * 4


def _stride(rows: torch.Tensor | None) -> int:
    return 0 if rows is None else rows.stride(0)


@triton.jit
def _rows_and_norm(x, rows, cols, mask, stride, eps, D: tl.constexpr):
    """Rows in fp32 times their inverse norms, ``[ROWS, BLOCK]``, and those ``[ROWS]``."""
    value = tl.load(x + rows[:, None] * stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, 1) / D + eps)
    return value * inverse[:, None], inverse


@triton.jit
def _fused_norm(
    x,
    gate,
    weight,
    y,
    num_rows,
    stride_x,
    stride_gate,
    eps,
    OFFSET: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROUNDS: tl.constexpr,
    ROUNDS_PRODUCT: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (cols < D)[None, :]
    scale = tl.load(weight + cols, mask=cols < D, other=0.0).to(tl.float32) + OFFSET
    value, _ = _rows_and_norm(x, rows, cols, mask, stride_x, eps, D)
    if ROUNDS:
        value = value.to(x.dtype.element_ty).to(tl.float32)
    value = value * scale[None, :]
    if ACTIVATION > 0:
        if ROUNDS_PRODUCT:
            value = value.to(x.dtype.element_ty).to(tl.float32)
        z = tl.load(gate + rows[:, None] * stride_gate + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if ACTIVATION == 2:
            value = value * z
        value = value * tl.sigmoid(z)
    tl.store(y + rows[:, None] * D + cols[None, :], value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _fused_norm_backward(
    x,
    gate,
    weight,
    dy,
    dx,
    d_gate,
    partial,
    num_rows,
    stride_x,
    stride_gate,
    stride_dy,
    tiles,
    eps,
    OFFSET: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROUNDS: tl.constexpr,
    ROUNDS_PRODUCT: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    scale = tl.load(weight + cols, mask=cols < D, other=0.0).to(tl.float32) + OFFSET
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for tile in range(tiles):
        rows = (program * tiles + tile) * ROWS + tl.arange(0, ROWS)
        mask = (rows < num_rows)[:, None] & (cols < D)[None, :]
        grad = tl.load(dy + rows[:, None] * stride_dy + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        normalized, inverse = _rows_and_norm(x, rows, cols, mask, stride_x, eps, D)
        rounded = normalized
        if ROUNDS:
            rounded = normalized.to(x.dtype.element_ty).to(tl.float32)
        if ACTIVATION > 0:
            z = tl.load(gate + rows[:, None] * stride_gate + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            open = tl.sigmoid(z)
            product = rounded * scale[None, :]
            if ROUNDS_PRODUCT:
                product = product.to(x.dtype.element_ty).to(tl.float32)
            slope = open * (1.0 - open)
            if ACTIVATION == 2:
                slope = open + z * slope
                open = open * z
            d_z = grad * product * slope
            tl.store(d_gate + rows[:, None] * D + cols[None, :], d_z.to(d_gate.dtype.element_ty), mask=mask)
            grad = grad * open
        total += tl.sum(grad * rounded, 0)
        grad = grad * scale[None, :]
        along = tl.sum(grad * normalized, 1) / D
        grad = (grad - normalized * along[:, None]) * inverse[:, None]
        tl.store(dx + rows[:, None] * D + cols[None, :], grad.to(dx.dtype.element_ty), mask=mask)
    tl.store(partial + program * D + cols, total, mask=cols < D)
