"""Chunk nodes renumbered level by level, so that each level is one slice of every tensor."""

from dataclasses import dataclass
from itertools import pairwise

import torch

from harts_hf.batch import GatherIndex, LinearTables


@dataclass(frozen=True, eq=False)
class Level:
    """One step of the recurrence; all indices are places within a level's slice or within its kept nodes.

    Attributes:
        nodes: the level's nodes, a slice of the renumbered ones.
        kept: ``[k]`` which of them leave a state that somebody reads; None for all of them.
        num_kept: k.
        parents: for each node the place, among the kept nodes of the level before, of the state that it starts from
            (levels after the first).
        exports: rows of the exported states that this level fills.
        exported: for each of them the place among the kept nodes.
    """

    nodes: slice
    kept: torch.Tensor | None
    num_kept: int
    parents: torch.Tensor
    exports: torch.Tensor
    exported: torch.Tensor


@dataclass(frozen=True, eq=False)
class LevelOrder:
    """The tables of a call in level order.

    Attributes:
        gather: the gather table with its places renumbered.
        output_places: ``[N]`` ``node * C + slot`` from which each own row's output is taken.
        levels: the steps.
        starts: nodes of the first level that start from a boundary state.
        initial: that state, for each of them.
        parent: ``[M]`` as in the tables.
        exported: ``[X]`` exported nodes.
        chunk_size: C.
    """

    gather: GatherIndex
    output_places: torch.Tensor
    levels: list[Level]
    starts: torch.Tensor
    initial: torch.Tensor
    parent: torch.Tensor
    exported: torch.Tensor
    chunk_size: int

    @property
    def num_nodes(self) -> int:
        """M."""
        return len(self.parent)

    @classmethod
    def build(cls, tables: LinearTables, export_nodes: torch.Tensor) -> "LevelOrder":
        """Renumbers ``tables``."""
        size, order = tables.chunk_size, tables.level_nodes
        number = torch.empty_like(order)
        number[order] = torch.arange(len(order), device=order.device)
        parent = tables.parent[order]
        parent = torch.where(parent >= 0, number[parent], -1)
        exported = number[export_nodes]
        initial = tables.initial[order]
        starts = (initial >= 0).nonzero().squeeze(1)
        gather = GatherIndex(
            index=tables.gather.index.view(-1, size)[order].flatten(),
            ptr=tables.gather.ptr,
            places=number[tables.gather.places // size] * size + tables.gather.places % size,
        )
        return cls(
            gather=gather,
            output_places=number[tables.output.index // size] * size + tables.output.index % size,
            levels=_levels(tables.level_ptr, parent, tables.has_child[order], exported),
            starts=starts,
            initial=initial[starts],
            parent=parent,
            exported=exported,
            chunk_size=size,
        )


def _levels(
    level_ptr: tuple[int, ...], parent: torch.Tensor, has_child: torch.Tensor, exported: torch.Tensor
) -> list[Level]:
    is_kept = has_child.clone()
    is_kept[exported] = True
    kept = is_kept.nonzero().squeeze(1)
    place_in_kept = is_kept.cumsum(0) - 1
    kept_ptr = [0, *(is_kept.cumsum(0)[torch.tensor(level_ptr[1:], device=parent.device) - 1]).tolist()]
    export_order = exported.argsort(stable=True)
    export_bounds = torch.searchsorted(exported[export_order], torch.tensor(level_ptr, device=parent.device)).tolist()
    levels = []
    for level, (start, stop) in enumerate(pairwise(level_ptr)):
        first_kept, end_kept = kept_ptr[level], kept_ptr[level + 1]
        rows = export_order[export_bounds[level] : export_bounds[level + 1]]
        levels.append(
            Level(
                nodes=slice(start, stop),
                kept=None if end_kept - first_kept == stop - start else kept[first_kept:end_kept] - start,
                num_kept=end_kept - first_kept,
                parents=place_in_kept[parent[start:stop]] - kept_ptr[level - 1] if level else parent[:0],
                exports=rows,
                exported=place_in_kept[exported[rows]] - first_kept,
            )
        )
    return levels
