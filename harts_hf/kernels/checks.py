"""What the operations share: checking arguments, choosing a backend and a dtype."""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def choose_backend(
    op: str,
    backend: str | None,
    device: torch.device,
    *,
    by_device: Mapping[str, str | None],
    others: Sequence[str] = (),
    dtype: torch.dtype | None = None,
) -> str:
    """The backend to run.

    Args:
        op: name of the operation, for messages.
        backend: what the caller asked for, None to choose by device.
        device: where the tensors are.
        by_device: the default backend by device type; "reference" is valid everywhere.
        others: backends that are no device's default.
        dtype: of the inputs, where a GPU's kernels compute in float32: float64 has the CPU's default everywhere.

    Raises:
        ValueError: an unknown backend (the message lists the valid ones), or no default for this device.
    """
    valid = sorted({name for name in by_device.values() if name is not None} | {"reference", *others})
    if backend is None:
        backend = by_device.get("cpu" if dtype == torch.float64 else device.type)
        if backend is None:
            raise ValueError(
                f"{op} has no default backend for device {device.type!r}; move the tensors to one of "
                f"{sorted(by_device)} or ask for a backend by name: {valid}"
            )
    if backend not in valid:
        raise ValueError(f"expected the backend of {op} to be one of {valid}, got {backend!r}")
    return backend


def check_shape(name: str, tensor: torch.Tensor, expected: Sequence[int | str]) -> None:
    """Raises ValueError unless ``tensor`` has the ``expected`` shape; a string is a free size and only names it."""
    fits = tensor.dim() == len(expected) and all(
        isinstance(want, str) or want == size for want, size in zip(expected, tensor.shape, strict=True)
    )
    if not fits:
        shape = ", ".join(str(size) for size in expected)
        raise ValueError(f"expected {name} of shape [{shape}], got {list(tensor.shape)}")


def check_floating(**tensors: torch.Tensor) -> None:
    """Raises ValueError naming the first tensor that is not floating point."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"expected {name} to be floating point, got {tensor.dtype}")


def check_same_device(**tensors: torch.Tensor | None) -> None:
    """Raises ValueError unless all tensors are on one device."""
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        got = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"expected all tensors on one device, got {got}")


def wide_dtype(*tensors: torch.Tensor | None) -> torch.dtype:
    """The dtype to compute in: float32, or the inputs' dtype if wider."""
    dtype = torch.float32
    for tensor in tensors:
        if tensor is not None:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def exact_backward(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For the backward of an autograd function that is defined in the wide dtype.

    A backward that is called inside an autocast region would have its products rounded to bf16.
    """

    @wraps(backward)
    def run(ctx: Any, *grads: torch.Tensor | None) -> Any:
        device = next((grad.device.type for grad in grads if grad is not None), "cpu")
        with torch.autocast(device, enabled=False):
            return backward(ctx, *grads)

    return once_differentiable(run)
