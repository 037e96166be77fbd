"""States handed from trunk microbatches to their dependents, and the gradients that come back (DESIGN 5).

A trunk's layer *exports*: an identity on its main path that keeps detached copies of the rows that dependents read,
and in backward adds the gradients that the dependents left there. A dependent's layer *imports*: it reads those
copies, and in backward adds to their gradients, in float32 or wider. So a trunk's one backward needs no other root
than its scalar.

Both sides are safe under non-reentrant activation checkpointing: the graph is the first forward's, and the forward
that recomputes a layer only reads (copies are kept while :attr:`Handoff.keeping` says so).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from harts_hf.batch import Kind, TreeBatch


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
        self, readers: dict[tuple[int, Kind], int], *, offload: bool = False, expand_latents: bool = False
    ) -> None:
        self.readers = readers
        self.offload = offload
        self.expand_latents = expand_latents
        self.keeping = False
        self.anchor = torch.zeros((), requires_grad=True)
        self._slots: dict[tuple[int, Kind, int], Slot] = defaultdict(Slot)

    def slot(self, trunk: int, kind: Kind, layer: int) -> Slot:
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


def export_rows(
    batch: TreeBatch, kind: Kind, layer: int, tensors: Sequence[torch.Tensor], dims: Sequence[int]
) -> list[torch.Tensor]:
    """Hands over the rows of ``tensors`` that dependents read, if any; the tensors themselves go on unchanged.

    Args:
        batch: the running microbatch.
        kind: what the rows are.
        layer: index of the layer.
        tensors: each with the microbatch's own rows along its axis in ``dims``.
        dims: row axes.
    """
    if batch.handoff is None or kind not in batch.exports:
        return list(tensors)
    slot = batch.handoff.slot(batch.id, kind, layer)
    return list(_Export.apply(batch, kind, slot, tuple(dims), *tensors))


def import_rows(
    batch: TreeBatch, kind: Kind, layer: int, tensors: Sequence[torch.Tensor], dims: Sequence[int]
) -> list[torch.Tensor]:
    """Handed rows before own ones, for each tensor; the tensors themselves where nothing is handed over."""
    found = _pieces(batch, kind, layer, len(tensors))
    if found is None:
        return list(tensors)
    columns, order = found
    if order is not None:
        columns = _in_order(columns, order, dims)
    # In one step with the own rows, so that handed ones are not copied twice.
    return [
        torch.cat([*(piece.to(own.dtype) for piece in pieces), own], dim=dim)
        for pieces, own, dim in zip(columns, tensors, dims, strict=True)
    ]


def export_states(batch: TreeBatch, layer: int, output: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
    """Hands over recurrent states ``[X, H, K, V]``; ``output``, on the main path, carries their gradients back."""
    if batch.handoff is None or states is None:
        return output
    return _ExportStates.apply(batch, batch.handoff.slot(batch.id, "states", layer), output, states)


def imported(batch: TreeBatch, kind: Kind, layer: int, count: int) -> list[torch.Tensor] | None:
    """Handed rows or states along dimension 0 in ascending order of their tree rows, one tensor per quantity.

    Returns:
        None if there are none.

    Raises:
        HandoffError: they were freed, or never made.
    """
    found = _pieces(batch, kind, layer, count)
    if found is None:
        return None
    columns, order = found
    if order is not None:
        columns = _in_order(columns, order, [0] * count)
    return [pieces[0] if len(pieces) == 1 else torch.cat(pieces) for pieces in columns]


def _pieces(
    batch: TreeBatch, kind: Kind, layer: int, count: int
) -> tuple[list[list[torch.Tensor]], torch.Tensor | None] | None:
    """For each quantity its pieces, one a trunk, and how their rows have to be ordered if they are not."""
    table = batch.imports.get(kind)
    if table is None:
        return None
    if batch.handoff is None:
        raise HandoffError(f"microbatch {batch.id} reads states of {table.trunks}, but no window is running")
    columns: list[list[torch.Tensor]] = [[] for _ in range(count)]
    for trunk, index in zip(table.trunks, table.indices, strict=True):
        slot = batch.handoff.slot(trunk, kind, layer)
        if not slot.values:
            raise HandoffError(
                f"microbatch {batch.id} reads {kind} of layer {layer} of microbatch {trunk}, which were freed or "
                "never computed"
            )
        for column, piece in zip(columns, _Import.apply(batch.handoff.anchor, slot, index), strict=True):
            column.append(piece)
    return columns, table.order


def _in_order(columns: list[list[torch.Tensor]], order: torch.Tensor, dims: Sequence[int]) -> list[list[torch.Tensor]]:
    return [[torch.cat(pieces, dim).index_select(dim, order)] for pieces, dim in zip(columns, dims, strict=True)]


class _Export(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, batch: TreeBatch, kind: Kind, slot: Slot, dims: tuple[int, ...], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.export = (batch.handoff, batch.id, kind, slot, dims, batch.exports[kind])
        batch.handoff.keep(slot, tensors, batch.exports[kind], dims)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        handoff, trunk, kind, slot, dims, index = ctx.export
        _check_complete(handoff, trunk, kind, slot)
        if not slot.gradients:
            return None, None, None, None, *gradients
        added = [
            _add_rows(gradient, dim, index, extra)
            for gradient, dim, extra in zip(gradients, dims, slot.gradients, strict=True)
        ]
        return None, None, None, None, *added


class _ExportStates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, batch: TreeBatch, slot: Slot, output: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        ctx.export = (batch.handoff, batch.id, slot)
        ctx.state = (states.dtype, states.shape)
        batch.handoff.keep(slot, [states], torch.arange(len(states), device=states.device), [0])
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        handoff, trunk, slot = ctx.export
        _check_complete(handoff, trunk, "states", slot)
        dtype, shape = ctx.state
        if not slot.gradients:
            return None, None, gradient, gradient.new_zeros(shape, dtype=dtype)
        return None, None, gradient, slot.gradients[0].to(gradient.device, dtype)


class _Import(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, slot: Slot, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.source = (slot, index)
        return tuple(
            value.to(index.device).index_select(dim, index) for value, dim in zip(slot.values, slot.dims, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        slot, index = ctx.source
        if not slot.gradients:
            if not slot.values:
                raise HandoffError(
                    "expected handed states to live until the last dependent's backward, got freed ones"
                )
            slot.gradients = [torch.zeros_like(v, dtype=_wide(v.dtype)) for v in slot.values]
        for total, gradient, dim in zip(slot.gradients, gradients, slot.dims, strict=True):
            # A dependent reads a row once, so there is no order to fix within one call.
            total.index_add_(dim, index.to(total.device), gradient.to(total.device, total.dtype))
        slot.contributions += 1
        return None, None, None


def _check_complete(handoff: Handoff, trunk: int, kind: Kind, slot: Slot) -> None:
    expected = handoff.readers.get((trunk, kind), 0)
    if slot.contributions != expected:
        raise HandoffError(
            f"backward of microbatch {trunk} after {slot.contributions} of the {expected} backwards that read its "
            f"{kind}"
        )


def _add_rows(gradient: torch.Tensor, dim: int, index: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
    """``gradient`` with ``extra`` added at rows ``index``, rounded once."""
    rows = gradient.index_select(dim, index)
    total = (rows.to(extra.dtype) + extra.to(rows.device)).to(gradient.dtype)
    return gradient.index_copy(dim, index, total)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
