"""Bugs of sharing across microbatches, planted like those of :mod:`support.planted`."""

import dataclasses
from typing import Any

import numpy as np
import torch

from harts_hf.batch import GatherIndex, TreeBatch
from harts_hf.modeling import TreePass, boundary, forwards, mixers
from harts_hf.modeling.handoff import Handoff
from harts_hf.runtime import run
from support.planted import _after_batch, _wrap


def leaf_gradients_in_bfloat16(monkeypatch: Any) -> None:
    """Gradients of handed states are summed over the dependents in the states' own dtype."""
    monkeypatch.setattr(boundary, "_wide", lambda dtype: dtype)


def handed_states_in_bfloat16(monkeypatch: Any) -> None:
    """Recurrent states are rounded to bfloat16 when they are handed over."""

    def keep(original: Any, self: Handoff, slot: Any, tensors: Any, *args: Any) -> None:
        rounded = [tensor.bfloat16().to(tensor.dtype) if tensor.dim() == 4 else tensor for tensor in tensors]
        original(self, slot, rounded, *args)

    _wrap(monkeypatch, Handoff, "keep", keep)


def _without(index: torch.Tensor, gather: GatherIndex, is_missing: torch.Tensor) -> GatherIndex:
    return GatherIndex.build(torch.where(is_missing, -1, index).numpy(), gather.num_rows)


def one_token_too_few_handed_over(monkeypatch: Any) -> None:
    """A dependent's first chunk lacks the first of the tokens to be replayed."""

    def change(batch: TreeBatch) -> dict[str, Any]:
        linear = batch.linear
        if linear.num_read > batch.num_rows:  # the first handed row is row 0
            rows = np.where(linear.slot_rows == 0, -1, linear.slot_rows)
            return {"linear": dataclasses.replace(linear, slot_rows=rows)}
        return {}

    _after_batch(monkeypatch, change)


def conv_rows_dropped(monkeypatch: Any) -> None:
    """A dependent's convolution begins with zeros instead of the trunk's last rows."""

    def conv(original: Any, batch: TreeBatch, width: int) -> Any:
        table = original(batch, width)
        handed = table.gather.num_rows - batch.num_rows
        index = table.gather.index
        return dataclasses.replace(table, gather=_without(index, table.gather, index < handed))

    _wrap(monkeypatch, TreeBatch, "conv", conv)


def handed_rows_in_another_order(monkeypatch: Any) -> None:
    """Rows that come from several trunks stand in the reverse order of the trunks."""

    def change(batch: TreeBatch) -> dict[str, Any]:
        imports = {
            kind: dataclasses.replace(table, trunks=table.trunks[::-1], indices=table.indices[::-1])
            for kind, table in batch.imports.items()
        }
        return {"imports": imports}

    _after_batch(monkeypatch, change)


def exported_twice_under_recompute(monkeypatch: Any) -> None:
    """Every forward with gradients of a trunk's layer exports anew, and each export takes the gradients back."""
    exported: dict[int, int] = {}

    def export(original: Any, tree_pass: TreePass, kind: Any, layer: int, *args: Any) -> Any:
        batch, handoff = tree_pass.batch, tree_pass.handoff
        if torch.is_grad_enabled() and handoff is not None and kind in batch.exports:
            slot = id(handoff.slot(batch.id, kind, layer))
            exported[slot] = exported.get(slot, 0) + 1
        return original(tree_pass, kind, layer, *args)

    _wrap(monkeypatch, mixers, "export_rows", export)
    original = boundary._Export.backward

    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        slot = ctx.export[0].slot
        slot.gradients = [gradient * exported[id(slot)] for gradient in slot.gradients]
        return original(ctx, *gradients)

    monkeypatch.setattr(boundary._Export, "backward", staticmethod(backward))


def last_dependents_gradients_only(monkeypatch: Any) -> None:
    """A dependent's gradients of handed states replace those of the dependent before it."""
    original = boundary._Import.backward

    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        slot = ctx.source[0]
        slot.gradients = []
        return original(ctx, *gradients)

    monkeypatch.setattr(boundary._Import, "backward", staticmethod(backward))


def row_without_weight_scored(monkeypatch: Any) -> None:
    """A microbatch without coefficients is kept in the backward by a log-prob times zero."""

    def score(original: Any, hidden: Any, weight: Any, bias: Any, rows: Any, labels: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not len(rows):
            first = torch.zeros(1, dtype=torch.int64)
            kwargs = {**kwargs, "host_rows": None, "backend": "reference"}
            return original(hidden, weight, bias, first, first, **kwargs)
        return original(hidden, weight, bias, rows, labels, **kwargs)

    _wrap(monkeypatch, forwards, "token_logprobs", score)


def dependent_before_its_trunk(monkeypatch: Any) -> None:
    """The scoring pass runs dependents first."""

    def ops_of(original: Any, *args: Any) -> Any:
        ops, count = original(*args)
        return [*reversed(ops[:count]), *ops[count:]], count

    _wrap(monkeypatch, run, "ops_of", ops_of)


def freed_before_the_recompute(monkeypatch: Any) -> None:
    """Handed states are freed after the last forward that reads them, though activation checkpointing reads again."""

    def lives(original: Any, ops: Any, batches: Any) -> Any:
        found = original(ops, batches)
        drops: list[list[int]] = [[] for _ in ops]
        for position, trunks in enumerate(found.drops):
            kind, index = ops[position]
            drops[ops.index(("F", index)) if kind == "B" else position].extend(trunks)
        return dataclasses.replace(found, drops=tuple(map(tuple, drops)))

    _wrap(monkeypatch, run, "handoff_lives", lives)
