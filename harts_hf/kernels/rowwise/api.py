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


def _chosen(name: str, backend: str | None, x: torch.Tensor) -> str:
    if backend is None and x.dtype == torch.float64:
        return "reference"  # the GPU's kernels compute in float32
    return choose_backend(name, backend, x.device, by_device=_BY_DEVICE)
