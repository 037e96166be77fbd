"""Clipping of gradients that touches them only where it clips.

``torch.nn.utils.clip_grad_norm_`` multiplies every gradient by a coefficient that is mostly 1 (and, where the norm has
another dtype than a gradient, one parameter at a time). The norm is read here instead, which waits for the backward
once, and nothing is multiplied where the coefficient is 1: the same bits.
"""

from typing import Any

import torch
from accelerate import DistributedType
from torch import nn
from torch.distributed.tensor import DTensor

from harts_hf.modeling import walking

# Whose gradients are whole on every process.
_WHOLE = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)


def clip_gradients(trainer: Any, model: nn.Module, max_norm: float) -> torch.Tensor | None:
    """What Trainer's clipping does, and its norm; None where it has to be Trainer's own (sharded gradients).

    Args:
        trainer: whose gradients are complete.
        model: as the trainer calls it.
        max_norm: of all gradients together; infinite where only the norm is wanted.

    Returns:
        The norm before clipping, a scalar.
    """
    accelerator = trainer.accelerator
    if accelerator.distributed_type not in _WHOLE:
        return None
    parameters = [parameter for parameter in walking.parameters(model) if parameter.grad is not None]
    if any(isinstance(parameter.grad, DTensor) for parameter in parameters):
        return None
    accelerator.unscale_gradients()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])  # type: ignore[misc]
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # PyTorch's
    if bool(coefficient != 1):  # NaN, too
        if all(parameter.grad.is_cuda for parameter in parameters):  # type: ignore[union-attr]
            _multiply([parameter.grad for parameter in parameters], coefficient)
        else:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _multiply(gradients: list[Any], coefficient: torch.Tensor) -> None:
    """Multiplies in place, many at a time: PyTorch's kernel for that wants a factor of the gradients' own dtype. A GPU
    rounds a factor of another to it where it multiplies one by one, so the bits are the same."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, dtype), alike in kinds.items():
        torch._foreach_mul_(alike, coefficient.to(device, dtype))
