# ruff: noqa: ANN001, ANN202 -- Triton reads a kernel's annotations as its own types
# mypy: disallow-untyped-defs=False
"""Rotary embeddings in Triton: a turn of each pair of columns, and the turn back in the backward."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

_ROWS = 16


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """See :func:`harts_hf.kernels.rowwise.api.rotate`.

    Raises:
        ValueError: float64, which these kernels would compute in float32.
    """
    if x.dtype == torch.float64:
        raise ValueError("expected at most float32, got float64: use the reference backend")
    out: torch.Tensor = _Rotate.apply(x, cos, sin, interleaved)
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.dtype = interleaved, x.dtype
        dtype = torch.promote_types(x.dtype, cos.dtype)
        return _turned(x, cos, sin, dtype, reads_interleaved=interleaved, writes_interleaved=False, sign=1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        dx = _turned(grad, cos, sin, ctx.dtype, reads_interleaved=False, writes_interleaved=ctx.interleaved, sign=-1.0)
        return dx, None, None, None


def _turned(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    dtype: torch.dtype,
    *,
    reads_interleaved: bool,
    writes_interleaved: bool,
    sign: float,
) -> torch.Tensor:
    """``[1, H, N, D]``, in memory as ``[N, H, D]``, which is what attention reads."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    _, heads, rows, columns = x.shape
    turned = cos.shape[-1]
    out = torch.empty(rows, heads, columns, dtype=dtype, device=x.device)
    if out.numel():
        _fused_rotate[(triton.cdiv(rows * heads, _ROWS),)](
            x, cos, sin, out, rows * heads, heads, x.stride(2), x.stride(1), sign,
            D=columns, HALF=turned // 2, BLOCK=triton.next_power_of_2(turned // 2),
            REST=triton.next_power_of_2(columns - turned) if columns > turned else 0,
            READS_INTERLEAVED=reads_interleaved, WRITES_INTERLEAVED=writes_interleaved, ROWS=_ROWS,
        )  # fmt: skip
    return out.transpose(0, 1)[None]


@triton.jit
def _fused_rotate(
    x,
    cos,
    sin,
    out,
    num_rows,
    heads,
    stride_row,
    stride_head,
    sign,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    READS_INTERLEAVED: tl.constexpr,
    WRITES_INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = rows // heads
    source = x + (token * stride_row + (rows % heads) * stride_head)[:, None]
    target = out + (rows * D)[:, None]
    pair = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (pair < HALF)[None, :]
    angle = (token * 2 * HALF)[:, None] + pair[None, :]
    c = tl.load(cos + angle, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=mask, other=0.0).to(tl.float32) * sign
    if READS_INTERLEAVED:
        one, other = 2 * pair, 2 * pair + 1
    else:
        one, other = pair, pair + HALF
    a = tl.load(source + one[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + other[None, :], mask=mask, other=0.0).to(tl.float32)
    if WRITES_INTERLEAVED:
        one, other = 2 * pair, 2 * pair + 1
    else:
        one, other = pair, pair + HALF
    tl.store(target + one[None, :], (a * c - b * s).to(out.dtype.element_ty), mask=mask)
    tl.store(target + other[None, :], (b * c + a * s).to(out.dtype.element_ty), mask=mask)
    if REST > 0:
        rest = 2 * HALF + tl.arange(0, REST)
        mask = (rows < num_rows)[:, None] & (rest < D)[None, :]
        value = tl.load(source + rest[None, :], mask=mask, other=0.0)
        tl.store(target + rest[None, :], value.to(out.dtype.element_ty), mask=mask)
