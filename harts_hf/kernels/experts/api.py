"""Rows of tokens brought to their experts, gated there, and summed back.

The weights of the choices multiply between an expert's two products instead of behind the second, which is the same
sum: then the rows that come out of the second need not be kept, and their gradients are plain copies.
"""

import torch

from harts_hf.kernels.checks import check_floating, check_same_device, check_shape, choose_backend
from harts_hf.kernels.experts import reference
from harts_hf.kernels.experts.order import Order, order_by_expert

__all__ = ["Order", "combine", "expand", "order_by_expert", "weighted_swiglu"]

_BY_DEVICE = {"cpu": "reference", "cuda": "triton"}


def expand(x: torch.Tensor, order: Order, *, backend: str | None = None) -> torch.Tensor:
    """The row of its token for every choice, sorted by expert; :func:`combine` is its backward.

    Args:
        x: ``[N, D]``.
        order: of the choices.
        backend: "triton" or "reference"; None chooses by device.

    Returns:
        ``[S, D]``.

    Raises:
        ValueError: shapes, dtypes, devices or backend other than stated.
    """
    check_floating(x=x)
    check_shape("x", x, (len(order.rows), "D"))
    check_same_device(x=x, order=order.rows)
    if _chosen("expand", backend, x) == "triton":
        from harts_hf.kernels.experts import triton as triton_backend

        return triton_backend.expand(x, order)
    return reference.expand(x, order)


def combine(y: torch.Tensor, order: Order, *, backend: str | None = None) -> torch.Tensor:
    """The sum over each token's choices, in float32 (or wider), in their order; :func:`expand` is its backward.

    Args:
        y: ``[S, D]``.
        order: of the choices.
        backend: "triton" or "reference"; None chooses by device.

    Returns:
        ``[N, D]``, dtype of ``y``.

    Raises:
        ValueError: shapes, dtypes, devices or backend other than stated.
    """
    check_floating(y=y)
    check_shape("y", y, (len(order.choices), "D"))
    check_same_device(y=y, order=order.rows)
    if _chosen("combine", backend, y) == "triton":
        from harts_hf.kernels.experts import triton as triton_backend

        return triton_backend.combine(y, order)
    return reference.combine(y, order)


def weighted_swiglu(
    both: torch.Tensor, weights: torch.Tensor, order: Order, *, backend: str | None = None
) -> torch.Tensor:
    """``weight * silu(gate) * up`` of every row, rounded once.

    Args:
        both: ``[S, 2 * D]``, gates before ups.
        weights: ``[N, k]`` of the choices.
        order: of the choices.
        backend: "triton" or "reference"; None chooses by device.

    Returns:
        ``[S, D]``, dtype of ``both``.

    Raises:
        ValueError: shapes, dtypes, devices or backend other than stated.
    """
    check_floating(both=both, weights=weights)
    check_shape("both", both, (len(order.choices), "2D"))
    check_shape("weights", weights, tuple(order.rows.shape))
    check_same_device(both=both, weights=weights, order=order.rows)
    if both.shape[1] % 2:
        raise ValueError(f"expected gates and ups of equal widths, got {both.shape[1]} columns together")
    if _chosen("weighted_swiglu", backend, both) == "triton":
        from harts_hf.kernels.experts import triton as triton_backend

        return triton_backend.weighted_swiglu(both, weights, order)
    return reference.weighted_swiglu(both, weights, order)


def _chosen(name: str, backend: str | None, x: torch.Tensor) -> str:
    if backend is None and x.dtype == torch.float64:
        return "reference"  # the GPU's kernels compute in float32
    return choose_backend(name, backend, x.device, by_device=_BY_DEVICE)
