"""The store of states handed from trunk microbatches to their dependents, and of the gradients that come back.

What puts them there and takes them out are the functions of :mod:`harts_hf.modeling.boundary`.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from harts_hf.batch import HandedKind


class HandoffError(RuntimeError):
    """States that are read after they were freed, or a trunk's backward before all of its dependents'."""


@dataclass(eq=False)
class Slot:
    """What one layer of one trunk hands over of one kind.

    Attributes:
        values: one tensor per quantity (keys and values; q, k, v, g, beta; ...), rows along the layer's row axis;
            empty when not kept.
        gradients: float32 or wider, of the same shapes; empty before the first dependent's backward.
        dims: the row axis of each quantity.
        contributions: dependents' backwards that have added to ``gradients``.
    """

    values: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    dims: list[int] = field(default_factory=list)
    contributions: int = 0


class Handoff:
    """The handed states of one running window on one rank.

    Args:
        readers: for each microbatch id and kind, how many microbatches read it.
        offload: whether values and gradients lie on the CPU between uses.
        expand_latents: whether an MLA hands over expanded keys and values instead of its latents, which each
            dependent would expand again: more bytes, less work.

    Attributes:
        keeping: whether the running forward is to keep what it exports; set by the runtime for each op.
        anchor: a leaf that every import hangs on; a backward that names its inputs has to name it too, or autograd
            would leave the imports out.
    """

    def __init__(
        self, readers: dict[tuple[int, HandedKind], int], *, offload: bool = False, expand_latents: bool = False
    ) -> None:
        self.readers = readers
        self.offload = offload
        self.expand_latents = expand_latents
        self.keeping = False
        self.anchor = torch.zeros((), requires_grad=True)
        self._slots: dict[tuple[int, HandedKind, int], Slot] = defaultdict(Slot)

    def slot(self, trunk: int, kind: HandedKind, layer: int) -> Slot:
        """The slot of a trunk's layer, made on first use."""
        return self._slots[trunk, kind, layer]

    def keep(self, slot: Slot, tensors: Sequence[torch.Tensor], indices: torch.Tensor, dims: Sequence[int]) -> None:
        """Keeps copies of rows, if the running op is to keep any."""
        if not self.keeping:
            return
        rows = [tensor.detach().index_select(dim, indices) for tensor, dim in zip(tensors, dims, strict=True)]
        slot.values = [row.cpu() for row in rows] if self.offload else rows
        slot.dims = list(dims)

    def drop_values(self, trunk: int) -> None:
        """Frees the values of a trunk; its gradients stay."""
        for (owner, _, _), slot in self._slots.items():
            if owner == trunk:
                slot.values = []

    def free(self, trunk: int) -> None:
        """Frees everything of a trunk."""
        for key in [key for key in self._slots if key[0] == trunk]:
            slot = self._slots.pop(key)
            slot.values, slot.gradients = [], []  # a graph that is still there refers to the slot

    def num_bytes(self) -> int:
        """Bytes of all values and gradients that are kept."""
        tensors = [t for slot in self._slots.values() for t in (*slot.values, *slot.gradients)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
