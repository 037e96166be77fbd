"""Rows and states that cross a cut, from trunks to their dependents, with their gradients (docs/windows.md).

A trunk's layer *exports*: an identity on its main path that keeps detached copies of the rows that dependents read,
and in backward adds the gradients that the dependents left there. A dependent's layer *imports*: it reads those
copies, and in backward adds to their gradients, in float32 or wider. So a trunk's one backward needs no other root
than its scalar.

Both sides are safe under non-reentrant activation checkpointing: the graph is the first forward's, and the forward
that recomputes a layer only reads (copies are kept while :attr:`Handoff.keeping` says so).
"""

from collections.abc import Sequence
from typing import Any

import torch

from harts_hf.batch import HandedKind
from harts_hf.modeling.handoff import Handoff, HandoffError, Slot
from harts_hf.modeling.tree_pass import TreePass


def export_rows(
    tree_pass: TreePass, kind: HandedKind, layer: int, tensors: Sequence[torch.Tensor], dims: Sequence[int]
) -> list[torch.Tensor]:
    """Hands over the rows of ``tensors`` that dependents read, if any; the tensors themselves go on unchanged.

    Args:
        tree_pass: the running forward.
        kind: what the rows are.
        layer: index of the layer.
        tensors: each with the microbatch's own rows along its axis in ``dims``.
        dims: row axes.
    """
    if tree_pass.handoff is None or kind not in tree_pass.batch.exports:
        return list(tensors)
    exporter = _Exporter(tree_pass.handoff, tree_pass.batch.id, kind, layer)
    return list(_Export.apply(exporter, tuple(dims), tree_pass.batch.exports[kind], *tensors))


def import_rows(
    tree_pass: TreePass, kind: HandedKind, layer: int, tensors: Sequence[torch.Tensor], dims: Sequence[int]
) -> list[torch.Tensor]:
    """Handed rows before own ones, for each tensor; the tensors themselves where nothing is handed over."""
    found = _pieces(tree_pass, kind, layer, len(tensors))
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


def export_states(tree_pass: TreePass, layer: int, output: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
    """Hands over recurrent states ``[X, H, K, V]``; ``output``, on the main path, carries their gradients back."""
    if tree_pass.handoff is None or states is None:
        return output
    return _ExportStates.apply(_Exporter(tree_pass.handoff, tree_pass.batch.id, "states", layer), output, states)


def imported(tree_pass: TreePass, kind: HandedKind, layer: int, count: int) -> list[torch.Tensor] | None:
    """Handed rows or states along dimension 0 in ascending order of their tree rows, one tensor per quantity.

    Returns:
        None if there are none.

    Raises:
        HandoffError: they were freed, or never made.
    """
    found = _pieces(tree_pass, kind, layer, count)
    if found is None:
        return None
    columns, order = found
    if order is not None:
        columns = _in_order(columns, order, [0] * count)
    return [pieces[0] if len(pieces) == 1 else torch.cat(pieces) for pieces in columns]


def _pieces(
    tree_pass: TreePass, kind: HandedKind, layer: int, count: int
) -> tuple[list[list[torch.Tensor]], torch.Tensor | None] | None:
    """For each quantity its pieces, one a trunk, and how their rows have to be ordered if they are not."""
    table = tree_pass.batch.imports.get(kind)
    if table is None:
        return None
    if tree_pass.handoff is None:
        raise HandoffError(f"microbatch {tree_pass.batch.id} reads states of {table.trunks}, but no window is running")
    columns: list[list[torch.Tensor]] = [[] for _ in range(count)]
    for trunk, index in zip(table.trunks, table.indices, strict=True):
        slot = tree_pass.handoff.slot(trunk, kind, layer)
        if not slot.values:
            raise HandoffError(
                f"microbatch {tree_pass.batch.id} reads {kind} of layer {layer} of microbatch {trunk}, which were "
                "freed or never computed"
            )
        for column, piece in zip(columns, _Import.apply(tree_pass.handoff.anchor, slot, index), strict=True):
            column.append(piece)
    return columns, table.order


def _in_order(columns: list[list[torch.Tensor]], order: torch.Tensor, dims: Sequence[int]) -> list[list[torch.Tensor]]:
    return [[torch.cat(pieces, dim).index_select(dim, order)] for pieces, dim in zip(columns, dims, strict=True)]


class _Exporter:
    """Where one layer of a trunk leaves rows of one kind, and finds their gradients."""

    def __init__(self, handoff: Handoff, trunk: int, kind: HandedKind, layer: int) -> None:
        self.handoff, self.trunk, self.kind = handoff, trunk, kind
        self.slot: Slot = handoff.slot(trunk, kind, layer)

    def gradients(self) -> list[torch.Tensor]:
        """Those of all dependents; empty if there are none.

        Raises:
            HandoffError: a dependent's backward has not run.
        """
        expected = self.handoff.readers.get((self.trunk, self.kind), 0)
        if self.slot.contributions != expected:
            raise HandoffError(
                f"backward of microbatch {self.trunk} after {self.slot.contributions} of the {expected} backwards "
                f"that read its {self.kind}"
            )
        return self.slot.gradients


class _Export(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exporter: _Exporter, dims: tuple[int, ...], index: torch.Tensor, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.export = (exporter, dims, index)
        exporter.handoff.keep(exporter.slot, tensors, index, dims)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        exporter, dims, index = ctx.export
        found = exporter.gradients()
        if not found:
            return None, None, None, *gradients
        added = [
            _add_rows(gradient, dim, index, extra) for gradient, dim, extra in zip(gradients, dims, found, strict=True)
        ]
        return None, None, None, *added


class _ExportStates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exporter: _Exporter, output: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        ctx.exporter = exporter
        ctx.state = (states.dtype, states.shape)
        exporter.handoff.keep(exporter.slot, [states], torch.arange(len(states), device=states.device), [0])
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        found = ctx.exporter.gradients()
        dtype, shape = ctx.state
        if not found:
            return None, gradient, gradient.new_zeros(shape, dtype=dtype)
        return None, gradient, found[0].to(gradient.device, dtype)


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


def _add_rows(gradient: torch.Tensor, dim: int, index: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
    """``gradient`` with ``extra`` added at rows ``index``, rounded once."""
    rows = gradient.index_select(dim, index)
    total = (rows.to(extra.dtype) + extra.to(rows.device)).to(gradient.dtype)
    return gradient.index_copy(dim, index, total)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
