"""The operations in plain PyTorch, rounded where the kernels round."""

from collections.abc import Callable

import torch
from torch.nn import functional as F

from harts_hf.kernels.checks import wide_dtype

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"sigmoid": torch.sigmoid, "silu": F.silu}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float, offset: float, rounds_first: bool) -> torch.Tensor:
    """See :func:`harts_hf.kernels.rowwise.api.rms_norm`."""
    normalized, wide = _normalized(x, weight, eps)
    if rounds_first:
        return (weight + offset) * normalized.to(x.dtype)
    return (normalized * (weight.to(wide) + offset)).to(x.dtype)


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, *, eps: float, activation: str, rounds_first: bool
) -> torch.Tensor:
    """See :func:`harts_hf.kernels.rowwise.api.gated_rms_norm`."""
    normalized, wide = _normalized(x, weight, eps)
    scaled = weight * normalized.to(x.dtype) if rounds_first else weight.to(wide) * normalized
    return (scaled * _ACTIVATIONS[activation](gate.to(wide))).to(x.dtype)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """See :func:`harts_hf.kernels.rowwise.api.swiglu`."""
    return F.silu(gate) * up


def decay_gate(
    x: torch.Tensor, log_rate: torch.Tensor, bias: torch.Tensor, *, bound: float | None, dtype: torch.dtype
) -> torch.Tensor:
    """See :func:`harts_hf.kernels.rowwise.api.decay_gate`."""
    wide = wide_dtype(x, log_rate, bias)
    shifted = (x.to(wide) + bias).unflatten(-1, (len(log_rate), -1))
    rate = log_rate.to(wide).exp()[:, None]
    gate = -rate * F.softplus(shifted) if bound is None else bound * torch.sigmoid(rate * shifted)
    return gate.to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """See :func:`harts_hf.kernels.rowwise.api.rotate`."""
    wide, half = wide_dtype(x, cos), cos.shape[-1] // 2
    turned, rest = x[..., : 2 * half].to(wide), x[..., 2 * half :]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    c, s = (angle[:, None, :, :half].to(wide) for angle in (cos, sin))
    dtype = torch.promote_types(x.dtype, cos.dtype)
    return torch.cat([a * c - b * s, b * c + a * s, rest.to(wide)], dim=-1).to(dtype)


def _normalized(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.dtype]:
    wide = wide_dtype(x, weight)
    row = x.to(wide)
    return row * torch.rsqrt(row.pow(2).mean(-1, keepdim=True) + eps), wide
