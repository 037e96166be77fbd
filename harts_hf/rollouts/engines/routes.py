"""Experts of the tokens that a model of this process reads: noted as it reads them, handed on with its states."""

from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from harts_hf.modeling import find_routers


@dataclass(frozen=True, eq=False, slots=True)
class ReadRoutes:
    """Experts of the tokens that a row has read.

    What continues a row shares it, so that a token's experts are held once however many rows read on from there.

    Attributes:
        before: of the tokens before; None for none.
        experts: ``[t, L, k]`` of the latest ones.
        length: tokens in all.
    """

    before: "ReadRoutes | None"
    experts: Tensor
    length: int

    def since(self, start: int) -> NDArray[np.int16]:
        """``[length - start, L, k]`` int16, of the tokens from ``start`` on."""
        pieces: list[Tensor] = []
        at: ReadRoutes | None = self
        while at is not None and at.length > start:
            first = at.length - len(at.experts)
            pieces.append(at.experts[max(start - first, 0) :])
            at = at.before
        whole = torch.cat(pieces[::-1]) if pieces else self.experts[:0]
        return whole.to(device="cpu", dtype=torch.int16).numpy()


class RouterTap:
    """Notes what a model's routers choose in the forward inside; a context manager.

    Args:
        model: with routers.

    Raises:
        ValueError: it has none.
    """

    def __init__(self, model: nn.Module) -> None:
        self._routers = find_routers(model)
        if not self._routers:
            raise ValueError(f"expected a mixture of experts where routes are wanted, got {type(model).__name__}")
        self._chosen: list[Tensor] = []
        self._handles: list[Any] = []

    def __enter__(self) -> "RouterTap":
        self._chosen = []
        self._handles = [router.register_forward_hook(self._note) for router in self._routers]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def experts(self, num_rows: int) -> Tensor:
        """``[R, t, L, k]`` of the forward, whose rows had as many columns each."""
        return torch.stack([one.unflatten(0, (num_rows, -1)) for one in self._chosen], dim=2).short()

    def _note(self, _: nn.Module, inputs: Any, answer: Any) -> None:
        self._chosen.append(answer[2])
