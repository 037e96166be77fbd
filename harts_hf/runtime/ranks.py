"""How the processes of a training move together; here the single one, which has nobody to agree with."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch import nn

from harts_hf.tree import IntArray


class OtherRankError(RuntimeError):
    """Another process failed before all of them would have met; the message has its rank and its error."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device's memory, or a CPU's, ran out (libraries raise it as other RuntimeErrors too)."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, Exception) and should_reduce_batch_size(error)
    )


class Ranks:
    """What a run asks of the processes beside it.

    Sharded backends (FSDP2, ZeRO-2, ZeRO-3) run collectives in every forward and backward, so all ranks have to run
    the same string of them; DDP and ZeRO-1 need one synchronised last backward. Ranks run equal strings of kinds of
    ops, filled up with dummy microbatches of one token and no weight.

    Every method but :meth:`run_apart` and the contexts around forwards and backwards is a collective where there are
    several processes: all of them have to call it, in the same order.

    Attributes:
        count: processes.
        index: of this one.
        forwards_meet: whether ranks wait for one another in forwards (sharded parameters), so that one that fails in
            a forward can tell nobody.
        can_begin_again: whether what an update has run so far can be dropped and run once more: not where backends
            add up gradients in buffers of their own, or where ops are collectives.
        exchanged_bytes: what collectives have brought here so far: token ids, values, coefficients.
        exchange_seconds: spent in those collectives so far, waiting for the others included.
    """

    count = 1
    index = 0
    forwards_meet = False
    can_begin_again = True
    exchanged_bytes = 0
    exchange_seconds = 0.0

    def gather(self, *numbers: int) -> list[tuple[int, ...]]:
        """Some numbers (of 63 bits) of every rank, by rank."""
        return [numbers]

    def agree(self, *numbers: int) -> tuple[int, ...]:
        """The largest of each number over all ranks."""
        return tuple(max(column) for column in zip(*self.gather(*numbers), strict=True))

    def gather_arrays(self, arrays: Sequence[IntArray]) -> list[list[IntArray]]:
        """Lists of 1-D integer arrays of every rank, by rank; lists and arrays may have other lengths on each."""
        return [list(arrays)]

    def gather_texts(self, text: str) -> list[str]:
        """A text of every rank, by rank."""
        own = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
        return [bytes(array.astype(np.uint8)).decode() for (array,) in self.gather_arrays([own])]

    def add_up(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Sums over all ranks of tensors whose shapes are the same on each: the same bits everywhere."""
        return list(tensors)

    def together(self) -> AbstractContextManager[object]:
        """Entered around what may fail on one rank alone; ranks meet at its end, and at each collective inside.

        Raises:
            OtherRankError: another rank raised an error inside. The rank whose error it was raises that.
        """
        return nullcontext()

    def ran_out(self, error: Exception) -> bool:
        """Tells the other ranks of an error of an update that they do not know of yet, as far as they can be told.

        Args:
            error: that ended the update here.

        Returns:
            Whether every rank knows that memory ran out and nothing else failed, so that all may begin again.
        """
        return is_out_of_memory(error)

    def before_ops(self, model: nn.Module) -> None:
        """Does what the first forward with a graph would else do together with the other ranks.

        Args:
            model: as it is called.
        """

    def run_apart(self) -> None:
        """Notes that this rank runs ops from here on, of which the others may see nothing until the last backward; no
        collective."""

    def scoring_model(self, model: nn.Module) -> nn.Module:
        """What forwards without gradients call."""
        return model

    def marked(self, is_last: bool) -> AbstractContextManager[object]:
        """Entered around what stands for a micro-step, with whether it is the last of the optimizer step."""
        return nullcontext()

    def around_forward(self, model: nn.Module) -> AbstractContextManager[object]:
        """Entered around a forward with a graph.

        Args:
            model: as it is called.
        """
        return nullcontext()

    def around_backward(
        self, model: nn.Module, outputs: Sequence[torch.Tensor], *, is_last: bool, follows: bool
    ) -> AbstractContextManager[object]:
        """Entered around a backward.

        Args:
            model: as its forward was called.
            outputs: of its forward.
            is_last: whether it is the last of the optimizer step.
            follows: whether its forward was the op before.
        """
        return nullcontext()

    def backward(self, scalar: torch.Tensor) -> None:
        """The backward of one microbatch."""
        scalar.backward()
