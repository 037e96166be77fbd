"""How the processes of a training move together; here the single one, which has nobody to agree with."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn


class Ranks:
    """What a run asks of the processes beside it.

    Sharded backends (FSDP2, ZeRO-2, ZeRO-3) run collectives in every forward and backward, so all ranks have to run
    the same string of them; DDP and ZeRO-1 need one synchronised last backward. The "replay" execution has the string
    ``S^n (F B)^n``: ranks agree on ``n`` and fill up with dummy microbatches of one token and no weight.

    Attributes:
        count: processes.
    """

    count = 1

    def agree(self, *numbers: int) -> tuple[int, ...]:
        """The largest of each number over all ranks; a collective where there are several."""
        return numbers

    def scoring_model(self, model: nn.Module) -> nn.Module:
        """What forwards without gradients call."""
        return model

    def marked(self, is_last: bool) -> AbstractContextManager[object]:
        """Entered around what stands for a micro-step, with whether it is the last of the optimizer step."""
        return nullcontext()

    def around(self, model: nn.Module, is_last: bool) -> AbstractContextManager[object]:
        """Entered around a forward and its backward where they stand together."""
        return nullcontext()

    def backward(self, scalar: torch.Tensor) -> None:
        """The backward of one microbatch."""
        scalar.backward()
