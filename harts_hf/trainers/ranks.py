"""Several processes under Accelerate: which backends are supported, agreement, and when gradients are reduced."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import nn

from harts_hf.errors import UnsupportedModelError
from harts_hf.runtime import Ranks
from harts_hf.trainers.replacing import replaced

DDP = (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)


def check_backend(accelerator: Any, execution: str) -> None:
    """Raises UnsupportedModelError for a way of running processes that is not supported."""
    kind = accelerator.distributed_type
    if accelerator.num_processes == 1:
        if kind == DistributedType.DEEPSPEED:  # its engine would step after every microbatch
            raise UnsupportedModelError("expected DeepSpeed with several processes, got one: run without it")
        return
    if kind == DistributedType.FSDP:
        version = getattr(accelerator.state.fsdp_plugin, "fsdp_version", 1)
        if version != 2:
            raise UnsupportedModelError(f"expected FSDP2 (fsdp_version: 2), got version {version}")
    elif kind not in (*DDP, DistributedType.DEEPSPEED):
        raise UnsupportedModelError(f"expected DDP, FSDP2 or DeepSpeed for several processes, got {kind}")
    if execution not in ("auto", "replay"):
        raise UnsupportedModelError(
            f"expected tree_execution='replay' with several processes (ranks have to run equal strings of forwards "
            f"and backwards), got {execution!r}"
        )


class AccelerateRanks(Ranks):
    """The processes of an ``accelerate.Accelerator``; the one place that says where an optimizer step ends."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator
        self.count = accelerator.num_processes

    def agree(self, *numbers: int) -> tuple[int, ...]:
        """The largest of each number over all ranks; a collective where there are several."""
        if self.count == 1:
            return numbers
        return tuple(int(number) for number in self._gathered(torch.tensor(numbers)).amax(dim=0))

    def totals(self, sums: dict[str, float], largest: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
        """Sums of some numbers over all ranks, and the largest of others; the same names on every rank."""
        if self.count == 1:
            return sums, largest
        gathered = self._gathered(torch.tensor([*sums.values(), *largest.values()], dtype=torch.float64))
        total, most = gathered.sum(dim=0).tolist(), gathered.amax(dim=0).tolist()
        return dict(zip(sums, total, strict=False)), dict(zip(largest, most[len(sums) :], strict=True))

    def _gathered(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.accelerator.gather(numbers.to(self.accelerator.device)[None])

    @contextmanager
    def gathering_ragged(self) -> Iterator[None]:
        """Inside, the accelerator gathers tensors of other first dimensions on each rank, which would abort gloo.

        TRL's losses gather one number per row for their metrics, and ranks have different numbers of rows.
        """
        if self.count == 1:
            yield
            return
        gather = self.accelerator.gather

        def gather_ragged(tensor: Any) -> Any:
            if not isinstance(tensor, torch.Tensor) or tensor.ndim == 0:
                return gather(tensor)
            lengths = gather(torch.tensor([len(tensor)], device=tensor.device)).tolist()
            padded = tensor.new_zeros(max(lengths), *tensor.shape[1:])
            padded[: len(tensor)] = tensor.detach()
            return torch.cat(
                [part[:length] for part, length in zip(gather(padded).split(max(lengths)), lengths, strict=True)]
            )

        with replaced(self.accelerator, "gather", gather_ragged):
            yield

    def scoring_model(self, model: nn.Module) -> nn.Module:
        """DDP's inner module, since its forward may broadcast buffers; else the wrapped one."""
        return self.accelerator.unwrap_model(model) if self.accelerator.distributed_type in DDP else model

    @contextmanager
    def marked(self, is_last: bool) -> Iterator[None]:
        """Sets ``sync_gradients``, where DeepSpeed steps and TRL's entropy controller acts; set afterwards."""
        self.accelerator.gradient_state._set_sync_gradients(is_last)
        try:
            yield
        finally:
            self.accelerator.gradient_state._set_sync_gradients(True)

    def around(self, model: nn.Module, is_last: bool) -> AbstractContextManager[object]:
        """DDP reduces in the last backward of a step only. FSDP2 reduces in each (keeping unsharded gradients would
        cost memory). DeepSpeed reduces in each and steps where it is marked as the last."""
        return nullcontext() if self.count == 1 else self._around(model, is_last)

    @contextmanager
    def _around(self, model: nn.Module, is_last: bool) -> Iterator[None]:
        skip = not is_last and self.accelerator.distributed_type in DDP
        with self.marked(is_last), self.accelerator.no_sync(model) if skip else nullcontext():
            yield

    def backward(self, scalar: torch.Tensor) -> None:
        """``accelerator.backward``; DeepSpeed's division by its accumulation steps is off, as in Trainer."""
        is_deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        self.accelerator.backward(scalar, **({"scale_wrt_gas": False} if is_deepspeed else {}))
