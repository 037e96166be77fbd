"""Several processes under Accelerate: which backends are supported, agreement, and when gradients are reduced."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate.utils import DistributedType, gather, reduce
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harts_hf.errors import UnsupportedModelError
from harts_hf.runtime import OtherRankError, Ranks
from harts_hf.runtime.ranks import is_out_of_memory
from harts_hf.trainers.replacing import replaced
from harts_hf.tree import IntArray

Found = TypeVar("Found")
DDP = (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)


# What a rank says where ranks meet; a place deeper inside says another number.
FAILED, RAN_OUT, CALLS, REDUCES, DONE, PLACES = range(6)
# Numbers that travel with it, enough for what TRL's losses gather: fewer collectives, and of one shape everywhere.
ROOM = 64
EXACT = 2**53  # what float64 holds


def check_backend(accelerator: Any) -> None:
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


class AccelerateRanks(Ranks):
    """The processes of an ``accelerate.Accelerator``; the one place that says where an optimizer step ends.

    Args:
        accelerator: of the trainer.
        sharded_by_transformers: whether Transformers loaded the model in parts, which Accelerate takes for DDP.
    """

    def __init__(self, accelerator: Any, *, sharded_by_transformers: bool = False) -> None:
        self.accelerator = accelerator
        self.count = accelerator.num_processes
        self.index = accelerator.process_index
        kind = accelerator.distributed_type
        self._is_ddp = kind in DDP and not sharded_by_transformers
        self.forwards_meet = (
            sharded_by_transformers
            or kind == DistributedType.FSDP
            or (kind == DistributedType.DEEPSPEED and accelerator.deepspeed_plugin.hf_ds_config.is_zero3())
        )
        self.can_begin_again = self.count == 1 or self._is_ddp
        # Where memory is there for whole parameters after forwards, it is after backwards too.
        self._stays_whole = kind == DistributedType.FSDP and not accelerator.state.fsdp_plugin.reshard_after_forward
        self._depth = 0  # of together()
        self._told: Exception | None = None  # the error that the other ranks know of
        self._ran_out = False  # whether all ranks know of the latest failure, which was that memory ran out
        self._apart = False  # whether ranks run ops of which the others see nothing, until the last backward

    # ---- agreement ----------------------------------------------------------------------------------------------

    def gather(self, *numbers: int) -> list[tuple[int, ...]]:
        """Some numbers of every rank, by rank."""
        if self.count == 1:
            return [numbers]
        return [tuple(row) for row in self._gathered(torch.tensor(numbers, dtype=torch.int64)).tolist()]

    def gather_arrays(self, arrays: Sequence[IntArray]) -> list[list[IntArray]]:
        """Lists of 1-D integer arrays of every rank, by rank; travels as int32 where numbers are small enough."""
        if self.count == 1:
            return [list(arrays)]
        lengths = np.array([len(array) for array in arrays], np.int64)
        content = np.concatenate([lengths, *arrays]).astype(np.int64)
        largest = int(np.abs(content).max(initial=0))
        sizes = self.gather(len(arrays), len(content), largest)
        is_small = max(size[2] for size in sizes) < 2**31
        padded = torch.zeros(max(size[1] for size in sizes), dtype=torch.int32 if is_small else torch.int64)
        padded[: len(content)] = torch.from_numpy(content)
        rows = self._gathered(padded).cpu().numpy().astype(np.int64)
        found = []
        for row, (number, size, _) in zip(rows, sizes, strict=True):
            ends = np.cumsum(row[:number])[:-1]
            found.append(np.split(row[number:size], ends) if number else [])
        return found

    def add_up(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Sums over all ranks, one all-reduce per dtype."""
        if self.count == 1:
            return list(tensors)
        found: dict[int, torch.Tensor] = {}
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            same = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
            flat = torch.cat([tensors[index].reshape(-1) for index in same]).to(self.accelerator.device)
            total = self._meeting(lambda flat=flat: reduce(flat, reduction="sum"))  # type: ignore[misc]
            for index, part in zip(same, total.split([tensors[index].numel() for index in same]), strict=True):
                found[index] = part.reshape(tensors[index].shape).to(tensors[index].device)
        return [found[index] for index in range(len(tensors))]

    @contextmanager
    def together(self) -> Iterator[None]:
        """See :meth:`harts_hf.runtime.Ranks.together`; collectives of the accelerator inside are watched too."""
        if self.count == 1:
            yield
            return
        self._depth += 1
        try:
            with self._watched() if self._depth == 1 else nullcontext():
                yield
        except OtherRankError:  # all ranks have met over it
            raise
        except Exception as error:
            if error is not self._told:
                self._told = error
                self._tell(error)
            raise
        else:
            self._meet(PLACES * self._depth + DONE)
        finally:
            self._depth -= 1
            if not self._depth:
                self._told = None  # its traceback holds the step's tensors

    def _tell(self, error: Exception) -> None:
        self._meet(RAN_OUT if is_out_of_memory(error) else FAILED, text=f"{type(error).__name__}: {error}")

    def ran_out(self, error: Exception) -> bool:
        """See :meth:`harts_hf.runtime.Ranks.ran_out`; under DDP ranks meet before the last backward."""
        if self.count == 1:
            return is_out_of_memory(error)
        if self._apart:
            self._apart = False
            self._tell(error)
        told, self._ran_out = self._ran_out, False
        return told and self.can_begin_again

    def before_ops(self, model: nn.Module) -> None:
        """DDP's first forward after a step sends rank 0's buffers to all, so that a rank whose memory runs out before
        it could tell nobody: they are sent here instead."""
        if isinstance(model, DistributedDataParallel):
            if model.will_sync_module_buffers():
                model._sync_buffers()
            model.require_forward_param_sync = False

    def run_apart(self) -> None:
        """See :meth:`harts_hf.runtime.Ranks.run_apart`."""
        self._apart = self._apart or (self._is_ddp and self.count > 1 and not self._depth)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Inside, what the accelerator gathers and reduces travels by :meth:`_meet`: TRL's losses gather metrics."""
        stock_gather, stock_reduce = self.accelerator.gather, self.accelerator.reduce

        def gathered(tensor: Any) -> Any:
            rows = self._meet(PLACES * self._depth + CALLS, tensor)
            if rows is None:  # NCCL has no CPU, where the loss may run
                return self._on_device(stock_gather(self._on_device(tensor)), like=tensor)
            return torch.cat([torch.atleast_1d(row) for row in rows])

        def reduced(tensor: Any, reduction: str = "sum", **kwargs: Any) -> Any:
            rows = self._meet(PLACES * self._depth + REDUCES, tensor if reduction == "sum" and not kwargs else None)
            if rows is None:
                return self._on_device(
                    stock_reduce(self._on_device(tensor), reduction=reduction, **kwargs), like=tensor
                )
            return torch.stack([row.double() for row in rows]).sum(dim=0).to(rows[0])

        with replaced(self.accelerator, "gather", gathered), replaced(self.accelerator, "reduce", reduced):
            yield

    def _meet(self, code: int, tensor: Any = None, text: str = "") -> list[torch.Tensor] | None:
        """Where ranks that go on find out about one that does not.

        Args:
            code: what this rank does.
            tensor: what it brings.
            text: its error.

        Returns:
            The tensors of all ranks as this one's is typed and placed, or None if one is no tensor or too large.
        """
        own = torch.full((ROOM,), -1.0, dtype=torch.float64)
        own[0] = code
        if _fits(tensor):
            own[1] = tensor.numel()
            own[2 : 2 + tensor.numel()] = tensor.detach().reshape(-1)
        rows = gather(self._on_device(own)[None]).cpu()
        codes, sizes = rows[:, 0].long().tolist(), rows[:, 1].long().tolist()
        failed = [rank for rank, found in enumerate(codes) if found in (FAILED, RAN_OUT)]
        if failed:
            self._ran_out, self._apart = FAILED not in codes, False
            self._depth, depth = 0, self._depth
            texts = self.gather_texts(text)
            self._depth = depth
            if code not in (FAILED, RAN_OUT):
                raise OtherRankError("; ".join(f"process {rank} raised {texts[rank]}" for rank in failed))
            return None
        self._ran_out = False
        if len(set(codes)) > 1:
            raise OtherRankError(
                f"expected the same collectives in the losses of all {self.count} processes, got another one on "
                f"process {next(rank for rank, found in enumerate(codes) if found != codes[0])} than on process 0"
            )
        if -1 in sizes:
            return None
        if len(set(sizes)) > 1:
            raise OtherRankError(
                f"expected the same collectives in the losses of all {self.count} processes, got {sizes} numbers"
            )
        return [row[2 : 2 + sizes[0]].reshape(tensor.shape).to(tensor) for row in rows]

    def _meeting(self, collective: Callable[[], Found]) -> Found:
        if self._depth:
            self._meet(PLACES * self._depth + CALLS)
        return self._raw(collective)

    def _raw(self, collective: Callable[[], Found]) -> Found:
        """Runs a collective of ours, with its bytes and seconds counted."""
        started = self._now()
        found = collective()
        self.exchange_seconds += self._now() - started
        self.exchanged_bytes += found.nbytes if isinstance(found, torch.Tensor) else 0
        return found

    def _now(self) -> float:
        if self.accelerator.device.type == "cuda":  # what is measured is not what was queued before
            torch.cuda.synchronize(self.accelerator.device)
        return time.perf_counter()

    def _on_device(self, tensor: Any, like: Any = None) -> Any:
        """A tensor where the process's collectives run, or where ``like`` is; anything else as it is."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        return tensor.to(self.accelerator.device if like is None else like.device)

    def _gathered(self, numbers: torch.Tensor) -> torch.Tensor:
        return self._meeting(lambda: gather(self._on_device(numbers)[None]))

    def totals(self, sums: dict[str, float], largest: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
        """Sums of some numbers over all ranks, and the largest of others; the same names on every rank."""
        if self.count == 1:
            return sums, largest
        gathered = self._gathered(torch.tensor([*sums.values(), *largest.values()], dtype=torch.float64))
        total, most = gathered.sum(dim=0).tolist(), gathered.amax(dim=0).tolist()
        return dict(zip(sums, total, strict=False)), dict(zip(largest, most[len(sums) :], strict=True))

    # ---- forwards and backwards ---------------------------------------------------------------------------------

    def scoring_model(self, model: nn.Module) -> nn.Module:
        """DDP's inner module, since its forward may broadcast buffers; else the wrapped one."""
        self.run_apart()
        return self.accelerator.unwrap_model(model) if self._is_ddp else model

    @contextmanager
    def marked(self, is_last: bool) -> Iterator[None]:
        """Sets ``sync_gradients``, where DeepSpeed steps and TRL's entropy controller acts; set afterwards."""
        self.accelerator.gradient_state._set_sync_gradients(is_last)
        try:
            yield
        finally:
            self.accelerator.gradient_state._set_sync_gradients(True)

    def around_forward(self, model: nn.Module) -> AbstractContextManager[object]:
        """DDP's reducer is armed by a forward whose own backward has to come next; here by the last backward."""
        if self.count == 1 or not self._is_ddp:
            return nullcontext()
        self.run_apart()
        return self.accelerator.no_sync(model)

    def around_backward(
        self, model: nn.Module, outputs: Sequence[torch.Tensor], *, is_last: bool, follows: bool
    ) -> AbstractContextManager[object]:
        """DDP reduces in the last backward of a step only. DeepSpeed reduces in each and steps where marked as the
        last. FSDP2 reduces in each (keeping unsharded gradients would cost memory), and with
        ``reshard_after_forward: false`` keeps parameters whole until the last."""
        return nullcontext() if self.count == 1 else self._around(model, outputs, is_last, follows)

    @contextmanager
    def _around(self, model: Any, outputs: Sequence[torch.Tensor], is_last: bool, follows: bool) -> Iterator[None]:
        kind = self.accelerator.distributed_type
        if kind == DistributedType.DEEPSPEED and not follows:
            # Only forwards do this: without it, ZeRO-3 has a second backward in a row overwrite the first's gradients.
            model.optimizer.clear_backward_seen_flag()
        if self._stays_whole:
            model.set_reshard_after_backward(is_last)
        self.run_apart()
        if self._is_ddp and is_last:
            if self._apart:  # who ran out of memory before is waiting here
                self._meet(DONE)
                self._apart = False
            model.require_backward_grad_sync = model.require_forward_param_sync = True
            model.reducer.prepare_for_backward(list(outputs) if model.find_unused_parameters else [])
        with self.marked(is_last):
            yield

    def backward(self, scalar: torch.Tensor) -> None:
        """``accelerator.backward``; DeepSpeed's division by its accumulation steps is off, as in Trainer."""
        is_deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        self.accelerator.backward(scalar, **({"scale_wrt_gas": False} if is_deepspeed else {}))


def _fits(tensor: Any) -> bool:
    """Whether float64 holds a tensor exactly, and the message has room for it."""
    if not isinstance(tensor, torch.Tensor) or tensor.numel() > ROOM - 2 or tensor.is_complex():
        return False
    return tensor.is_floating_point() or tensor.dtype == torch.bool or not bool((tensor.abs() > EXACT).any())
