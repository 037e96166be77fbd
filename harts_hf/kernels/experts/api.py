"""Rows of tokens brought to their experts, gated there, and summed back.

The weights of the choices multiply between an expert's two products instead of behind the second, which is the same
sum: then the rows that come out of the second need not be kept, and their gradients are plain copies.
"""

from typing import Any

import torch

from harts_hf.kernels.checks import check_floating, check_same_device, check_shape, choose_backend
from harts_hf.kernels.experts import reference
from harts_hf.kernels.experts.order import Order, order_by_expert

__all__ = ["Order", "combine", "expand", "order_by_expert", "route", "weighted_swiglu"]

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


def route(
    scores: torch.Tensor,
    bias: torch.Tensor,
    *,
    groups: int,
    kept_groups: int,
    count: int,
    normalizes: bool,
    factor: float,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepSeek-V3's choice of experts (arXiv 2412.19437, section 2.1.2): by score and bias, first of the groups whose
    two best experts have the largest sums, then of the experts in them; of equal ones the first. Weights are the
    scores without the bias.

    Args:
        scores: ``[N, E]``.
        bias: ``[E]``, without a gradient.
        groups: of ``E / groups`` experts each, at least two.
        kept_groups: how many groups experts are chosen from.
        count: k.
        normalizes: whether weights are divided by their sum (plus 1e-20).
        factor: of the weights.
        backend: "triton" (powers of two of experts and groups) or "reference"; None chooses by device.

    Returns:
        Weights ``[N, k]`` in the dtype of ``scores`` and experts ``[N, k]`` int64, the best first.

    Raises:
        ValueError: shapes, dtypes, devices or backend other than stated.
    """
    check_floating(scores=scores, bias=bias)
    check_shape("scores", scores, ("N", "E"))
    check_shape("bias", bias, (scores.shape[1],))
    check_same_device(scores=scores, bias=bias)
    members, rest = divmod(scores.shape[1], groups)
    if rest or members < 2 or not 0 < kept_groups <= groups or not 0 < count <= kept_groups * members:
        raise ValueError(
            f"expected groups of two experts or more that hold those chosen, got {scores.shape[1]} experts in "
            f"{groups} groups, of which {kept_groups} are kept, and {count} chosen"
        )
    options: dict[str, Any] = {"groups": groups, "kept_groups": kept_groups, "count": count, "normalizes": normalizes}
    if _chosen("route", backend, scores) == "triton":
        from harts_hf.kernels.experts import triton_routing

        return triton_routing.route(scores, bias, **options, factor=factor)
    return reference.route(scores, bias, **options, factor=factor)


def _chosen(name: str, backend: str | None, x: torch.Tensor) -> str:
    return choose_backend(name, backend, x.device, by_device=_BY_DEVICE, dtype=x.dtype)
