"""What TRL's losses gather for their metrics, where Accelerate's own way is wrong, slow, or not wanted."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from harts_hf.trainers.replacing import replaced


@contextmanager
def unmeasured(accelerator: Any) -> Iterator[None]:
    """Inside, the accelerator gathers and reduces on this rank alone: for a loss whose metrics nobody wants."""
    if accelerator.num_processes == 1:
        yield
        return
    with (
        replaced(accelerator, "gather", torch.atleast_1d),
        replaced(accelerator, "reduce", lambda tensor, **_: tensor.clone()),
    ):
        yield


@contextmanager
def gathering_alone(accelerator: Any) -> Iterator[None]:
    """Inside, the accelerator of a single process gathers and reduces tensors at once: Accelerate first reads the
    environment, for each metric of each slice."""
    if accelerator.num_processes > 1:
        yield
        return
    gather, reduce = accelerator.gather, accelerator.reduce

    def gathered(tensor: Any) -> Any:
        return tensor if isinstance(tensor, torch.Tensor) else gather(tensor)

    def reduced(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor.clone() if isinstance(tensor, torch.Tensor) else reduce(tensor, *args, **kwargs)

    with replaced(accelerator, "gather", gathered), replaced(accelerator, "reduce", reduced):
        yield


@contextmanager
def gathering_ragged(accelerator: Any) -> Iterator[None]:
    """Inside, the accelerator gathers tensors of other first dimensions on each rank, which would abort gloo.

    TRL's losses gather one number per row for their metrics, and ranks have different numbers of rows.
    """
    if accelerator.num_processes == 1:
        yield
        return
    gather = accelerator.gather

    def gather_ragged(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor) or tensor.ndim == 0:
            return gather(tensor)
        lengths = gather(torch.tensor([len(tensor)], device=tensor.device)).tolist()
        padded = tensor.new_zeros(max(lengths), *tensor.shape[1:])
        padded[: len(tensor)] = tensor.detach()
        return torch.cat(
            [part[:length] for part, length in zip(gather(padded).split(max(lengths)), lengths, strict=True)]
        )

    with replaced(accelerator, "gather", gather_ragged):
        yield
