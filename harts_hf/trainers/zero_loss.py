"""The loss of a micro-step that only keeps its slice: 0, and known to be."""

from typing import Any

import torch


class _Zero(torch.Tensor):
    """A zero that Trainer can ask whether it is NaN or infinite without waiting for a GPU, as it does twice a step.

    The answer is a tensor on the CPU, since a ``training_step`` of one's own may ask ``torch.isnan(loss).any()``.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.isnan, torch.isinf):
            return torch.tensor(False)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def zero_loss(device: torch.device | str) -> torch.Tensor:
    """A scalar 0 on ``device``."""
    return torch.zeros((), device=device).as_subclass(_Zero)
