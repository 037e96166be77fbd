"""Several processes: which backends are supported, equal strings of ops, and when gradients are reduced.

Sharded backends (FSDP2, ZeRO-2, ZeRO-3) run collectives in every forward and backward, so all ranks have to run the
same string of them; DDP and ZeRO-1 need one synchronised last backward. The "replay" execution has the string
``S^n (F B)^n``: ranks agree on ``n`` and fill up with dummy microbatches of one token and no weight.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import nn

from harts_hf.errors import UnsupportedModelError

DDP = (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)


def check_backend(accelerator: Any, execution: str) -> None:
    """Raises UnsupportedModelError for a way of running several processes that is not supported."""
    if accelerator.num_processes == 1:
        return
    kind = accelerator.distributed_type
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


def agreed_count(accelerator: Any, count: int) -> int | None:
    """The largest count over all ranks, a collective; None with one process, which has nobody to agree with."""
    if accelerator.num_processes == 1:
        return None
    return int(accelerator.gather(torch.tensor([count], device=accelerator.device)).max())


def scoring_model(accelerator: Any, model: nn.Module) -> nn.Module:
    """The module to score with: DDP's inner one, since its forward may broadcast buffers; else the wrapped one."""
    return accelerator.unwrap_model(model) if accelerator.distributed_type in DDP else model


def sync_context(accelerator: Any, model: nn.Module) -> Callable[[bool], AbstractContextManager[None]]:
    """What to enter around a forward and its backward, by whether they are the last of the step.

    DDP reduces in the last one only. FSDP2 reduces in each (keeping unsharded gradients would cost memory). DeepSpeed
    reduces in each and steps where ``sync_gradients`` is set.
    """
    if accelerator.num_processes == 1:
        return lambda is_last: nullcontext()

    @contextmanager
    def around(is_last: bool) -> Any:
        accelerator.gradient_state._set_sync_gradients(is_last)
        skip = not is_last and accelerator.distributed_type in DDP
        try:
            with accelerator.no_sync(model) if skip else nullcontext():
                yield
        finally:
            accelerator.gradient_state._set_sync_gradients(True)

    return around


def backward_function(accelerator: Any) -> Callable[[torch.Tensor], None]:
    """``accelerator.backward``; DeepSpeed's division by its accumulation steps is off, as in Trainer."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return lambda scalar: accelerator.backward(scalar, scale_wrt_gas=False)
    return accelerator.backward
