"""Depthwise causal convolution along the paths of a tree."""

import torch

from harts_hf.batch import ConvTable
from harts_hf.kernels.checks import check_floating, check_same_device, check_shape, choose_backend
from harts_hf.kernels.conv import reference
from harts_hf.kernels.conv import torch as torch_backend

_BY_DEVICE = {"cpu": "torch", "cuda": "triton"}
ACTIVATIONS = (None, "silu", "swish")


def tree_causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    table: ConvTable,
    *,
    activation: str | None,
    backend: str | None = None,
) -> torch.Tensor:
    """``y[n] = act(bias + sum_w weight[:, w] * x[ancestor(n, W - 1 - w)])``: Transformers' ``causal_conv1d_fn`` on
    every trajectory at once.

    Computed in float32 (or the inputs' dtype if wider), activation included, and rounded to ``x.dtype`` once, as the
    causal-conv1d kernels do; Transformers' torch fallback rounds before the activation.

    Args:
        x: ``[E + N, D]`` handed rows, then own rows.
        weight: ``[D, W]``.
        bias: ``[D]`` or None.
        table: the ancestors of the ``N`` own rows.
        activation: None, "silu" or "swish" (the same).
        backend: "torch", "triton" or "reference"; None chooses by device.

    Returns:
        ``[N, D]``, dtype of ``x``.

    Raises:
        ValueError: shapes, dtypes, devices, activation or backend other than stated.
    """
    check_floating(x=x, weight=weight)
    check_shape("x", x, (table.gather.num_rows, "D"))
    check_shape("weight", weight, (x.shape[1], table.width))
    if bias is not None:
        check_floating(bias=bias)
        check_shape("bias", bias, (x.shape[1],))
    if activation not in ACTIVATIONS:
        raise ValueError(f"expected activation to be one of {list(ACTIVATIONS)}, got {activation!r}")
    check_same_device(x=x, weight=weight, bias=bias, table=table.gather.index)
    chosen = choose_backend("tree_causal_conv1d", backend, x.device, by_device=_BY_DEVICE, dtype=x.dtype)
    if chosen == "triton":
        from harts_hf.kernels.conv import triton as triton_backend

        return triton_backend.tree_causal_conv1d(x, weight, bias, table, silu=activation is not None)
    run = reference.tree_causal_conv1d if chosen == "reference" else torch_backend.tree_causal_conv1d
    return run(x, weight, bias, table, silu=activation is not None)
