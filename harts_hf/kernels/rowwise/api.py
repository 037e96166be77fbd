"""Norms, gates and decays as Transformers' models define them, each one operation forward and one backward.

Everything is computed in float32 (or the inputs' dtype if wider) and rounded where the stock modules round; sums over
a row are in another order. Backwards compute again what follows from the inputs, so that nothing but inputs is kept,
and sum gradients of weights over rows in float32, in a fixed order.
"""

from typing import Literal, get_args

import torch

from harts_hf.kernels.checks import check_floating, check_same_device, check_shape, choose_backend
from harts_hf.kernels.rowwise import reference

Activation = Literal["sigmoid", "silu"]
_BY_DEVICE = {"cpu": "reference", "cuda": "triton"}


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    offset: float = 0.0,
    rounds_first: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """``(weight + offset) * x / sqrt(mean(x^2) + eps)`` of each row.

    Args:
        x: ``[..., D]``.
        weight: ``[D]``.
        eps: added to the mean of squares.
        offset: added to the weight (Qwen3.5 stores weights as differences from 1).
        rounds_first: whether the normalized row is rounded to ``x.dtype`` before the weight multiplies it, as Llama
            does; the result then has the wider of both dtypes.
        backend: "triton" or "reference"; None chooses by device.

    Returns:
        ``[..., D]``, dtype of ``x`` (see ``rounds_first``).

    Raises:
        ValueError: shapes, dtypes, devices or backend other than stated.
    """
    check_floating(x=x, weight=weight)
    check_shape("weight", weight, (x.shape[-1],))
    check_same_device(x=x, weight=weight)
    if _chosen("rms_norm", backend, x) == "triton":
        from harts_hf.kernels.rowwise import triton_norm

        return triton_norm.rms_norm(x, None, weight, eps=eps, offset=offset, rounds_first=rounds_first)
    return reference.rms_norm(x, weight, eps=eps, offset=offset, rounds_first=rounds_first)


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    activation: Activation,
    rounds_first: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """``weight * x / sqrt(mean(x^2) + eps) * act(gate)`` of each row.

    Args:
        x: ``[..., D]``.
        gate: the same shape.
        weight: ``[D]``.
        eps: added to the mean of squares.
        activation: of the gate.
        rounds_first: whether the normalized row is rounded to ``x.dtype`` before the weight, and their product before
            the gate (Qwen3.5); else it is rounded once, at the end (KDA's).
        backend: "triton" or "reference"; None chooses by device.

    Returns:
        ``[..., D]``, dtype of ``x``.

    Raises:
        ValueError: shapes, dtypes, devices, activation or backend other than stated.
    """
    check_floating(x=x, gate=gate, weight=weight)
    check_shape("gate", gate, tuple(x.shape))
    check_shape("weight", weight, (x.shape[-1],))
    check_same_device(x=x, gate=gate, weight=weight)
    if activation not in get_args(Activation):
        raise ValueError(f"expected activation to be one of {', '.join(get_args(Activation))}, got {activation!r}")
    if _chosen("gated_rms_norm", backend, x) == "triton":
        from harts_hf.kernels.rowwise import triton_norm

        return triton_norm.rms_norm(x, gate, weight, eps=eps, activation=activation, rounds_first=rounds_first)
    return reference.gated_rms_norm(x, gate, weight, eps=eps, activation=activation, rounds_first=rounds_first)


def swiglu(gate: torch.Tensor, up: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """``silu(gate) * up``, where SiLU is rounded before it multiplies.

    Args:
        gate: ``[..., D]``.
        up: the same shape and dtype.
        backend: "triton" or "reference"; None chooses by device.

    Returns:
        ``[..., D]``, the same dtype.

    Raises:
        ValueError: shapes, dtypes, devices or backend other than stated.
    """
    check_floating(gate=gate, up=up)
    check_shape("up", up, tuple(gate.shape))
    check_same_device(gate=gate, up=up)
    if gate.dtype != up.dtype:
        raise ValueError(f"expected gate and up of one dtype, got {gate.dtype} and {up.dtype}")
    if _chosen("swiglu", backend, gate) == "triton":
        from harts_hf.kernels.rowwise import triton_gates

        return triton_gates.swiglu(gate, up)
    return reference.swiglu(gate, up)


def decay_gate(
    x: torch.Tensor,
    log_rate: torch.Tensor,
    bias: torch.Tensor,
    *,
    bound: float | None,
    dtype: torch.dtype,
    backend: str | None = None,
) -> torch.Tensor:
    """The log decays of KDA: ``bound * sigmoid(exp(log_rate) * (x + bias))``, or without a bound
    ``-exp(log_rate) * softplus(x + bias)``.

    Args:
        x: ``[..., H * D]``.
        log_rate: ``[H]`` float32.
        bias: ``[H * D]`` float32.
        bound: the smallest value, or None.
        dtype: of the result.
        backend: "triton" or "reference"; None chooses by device.

    Returns:
        ``[..., H, D]``.

    Raises:
        ValueError: shapes, dtypes, devices or backend other than stated.
    """
    check_floating(x=x, log_rate=log_rate, bias=bias)
    check_shape("log_rate", log_rate, ("H",))
    check_shape("bias", bias, (x.shape[-1],))
    check_same_device(x=x, log_rate=log_rate, bias=bias)
    if x.shape[-1] % len(log_rate):
        raise ValueError(f"expected x of a multiple of {len(log_rate)} columns, got {x.shape[-1]}")
    if _chosen("decay_gate", backend, x) == "triton":
        from harts_hf.kernels.rowwise import triton_gates

        return triton_gates.decay_gate(x, log_rate, bias, bound=bound, dtype=dtype)
    return reference.decay_gate(x, log_rate, bias, bound=bound, dtype=dtype)


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool, backend: str | None = None
) -> torch.Tensor:
    """Rotary embeddings of the first ``R`` columns (arXiv 2104.09864); the others stay.

    Pair ``j`` of the ``R / 2`` is turned by its angle: ``(a, b) -> (a cos - b sin, b cos + a sin)``. Results stand in
    columns ``j`` and ``j + R / 2``. Both columns of a pair have the same angle, that of ``cos[..., j]``.

    Args:
        x: ``[1, H, N, D]``.
        cos: ``[1, N, R]``, its two halves alike, without gradients.
        sin: likewise.
        interleaved: whether a pair is read from columns ``2 j`` and ``2 j + 1``, else from those it is written to.
        backend: "triton" or "reference"; None chooses by device.

    Returns:
        ``[1, H, N, D]``, the wider dtype of ``x`` and ``cos``.

    Raises:
        ValueError: shapes, dtypes, devices or backend other than stated.
    """
    check_floating(x=x, cos=cos, sin=sin)
    check_shape("x", x, (1, "H", "N", "D"))
    check_shape("cos", cos, (1, x.shape[2], "R"))
    check_shape("sin", sin, tuple(cos.shape))
    check_same_device(x=x, cos=cos, sin=sin)
    if cos.shape[-1] % 2 or cos.shape[-1] > x.shape[-1]:
        raise ValueError(f"expected angles of an even number of at most {x.shape[-1]} columns, got {cos.shape[-1]}")
    if _chosen("rotate", backend, x) == "triton":
        from harts_hf.kernels.rowwise import triton_rotary

        return triton_rotary.rotate(x, cos, sin, interleaved=interleaved)
    return reference.rotate(x, cos, sin, interleaved=interleaved)


def _chosen(name: str, backend: str | None, x: torch.Tensor) -> str:
    return choose_backend(name, backend, x.device, by_device=_BY_DEVICE, dtype=x.dtype)
