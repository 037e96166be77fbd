"""Chunk nodes renumbered level by level, so that each level is one slice of every tensor."""

from dataclasses import dataclass, field
from itertools import pairwise

import torch

from harts_hf.batch import GatherIndex, LinearTables
from harts_hf.kernels.caching import kept_with_table


@dataclass(frozen=True, eq=False)
class Level:
    """One step of the recurrence: nodes ``start`` to ``stop`` of the renumbered ones.

    Attributes:
        start: first node.
        kept_stop: nodes from ``start`` to here leave a state that somebody reads, those from here to ``stop`` do not.
        stop: exclusive end.
        parents: ``[stop - start]`` for each node the position, among the kept nodes of the level before, of the state
            that it starts from (levels after the first).
        exports: rows of the exported states that this level fills.
        exported: for each of them the position among the kept nodes.
    """

    start: int
    kept_stop: int
    stop: int
    parents: torch.Tensor
    exports: torch.Tensor
    exported: torch.Tensor

    @property
    def num_kept(self) -> int:
        """Nodes that leave a state."""
        return self.kept_stop - self.start


@dataclass(frozen=True, eq=False)
class HeadTables:
    """The tables of a call over rows of single heads: row ``r`` and head ``h`` are row ``r * H + h``.

    Attributes:
        gather: ``M * H * C`` positions ``(node * H + head) * C + slot``.
        output_positions: ``[N * H]``.
    """

    gather: GatherIndex
    output_positions: torch.Tensor


@dataclass(frozen=True, eq=False)
class LevelOrder:
    """The tables of a call in level order; within a level the nodes that leave a state come first.

    Attributes:
        gather: the gather table with its positions renumbered.
        output_positions: ``[N]`` ``node * C + slot`` from which each own row's output is taken.
        levels: the steps.
        starts: nodes of the first level that start from a boundary state.
        initial: that state, for each of them.
        parent: ``[M]`` as in the tables.
        exported: ``[X]`` exported nodes.
        chunk_size: C.
    """

    gather: GatherIndex
    output_positions: torch.Tensor
    levels: list[Level]
    starts: torch.Tensor
    initial: torch.Tensor
    parent: torch.Tensor
    exported: torch.Tensor
    chunk_size: int
    _by_head: dict[int, HeadTables] = field(default_factory=dict)

    @property
    def num_nodes(self) -> int:
        """M."""
        return len(self.parent)

    def by_head(self, heads: int) -> HeadTables:
        """The tables for ``heads`` heads, kept for the next call."""
        if heads not in self._by_head:
            self._by_head[heads] = HeadTables(
                gather=_gather_by_head(self.gather, heads, self.chunk_size),
                output_positions=positions_by_head(self.output_positions, heads, self.chunk_size).flatten(),
            )
        return self._by_head[heads]

    @classmethod
    def build(cls, tables: LinearTables, export_nodes: torch.Tensor) -> "LevelOrder":
        """Renumbers ``tables``."""
        size, device = tables.chunk_size, tables.parent.device
        is_kept = tables.has_child.clone()
        is_kept[export_nodes] = True
        bounds = torch.tensor(tables.level_ptr, device=device)
        level = torch.repeat_interleave(torch.arange(len(bounds) - 1, device=device), bounds.diff())
        order = tables.level_nodes[torch.argsort(2 * level + ~is_kept[tables.level_nodes], stable=True)]
        number = torch.empty_like(order)
        number[order] = torch.arange(len(order), device=device)
        parent = tables.parent[order]
        parent = torch.where(parent >= 0, number[parent], -1)
        exported = number[export_nodes]
        initial = tables.initial[order]
        starts = (initial >= 0).nonzero().squeeze(1)
        kept_before = torch.nn.functional.pad(is_kept[order].cumsum(0), (1, 0))[bounds]
        return cls(
            gather=GatherIndex(
                index=tables.gather.index.view(-1, size)[order].flatten(),
                ptr=tables.gather.ptr,
                positions=number[tables.gather.positions // size] * size + tables.gather.positions % size,
            ),
            output_positions=number[tables.output.index // size] * size + tables.output.index % size,
            levels=_levels(tables.level_ptr, kept_before.diff().tolist(), parent, exported),
            starts=starts,
            initial=initial[starts],
            parent=parent,
            exported=exported,
            chunk_size=size,
        )


def level_order(tables: LinearTables, export_nodes: torch.Tensor) -> LevelOrder:
    """The tables in level order, kept for the next call if nothing is exported."""
    if len(export_nodes):
        return LevelOrder.build(tables, export_nodes)
    return _order_without_exports(tables)


@kept_with_table
def _order_without_exports(tables: LinearTables) -> LevelOrder:
    return LevelOrder.build(tables, torch.zeros(0, dtype=torch.int64, device=tables.parent.device))


def positions_by_head(positions: torch.Tensor, heads: int, chunk_size: int) -> torch.Tensor:
    """``node * C + slot`` ``[P]`` -> ``(node * heads + head) * C + slot`` ``[P, heads]``."""
    head = torch.arange(heads, device=positions.device)
    first = (positions // chunk_size * heads)[:, None] + head
    return first * chunk_size + (positions % chunk_size)[:, None]


def _gather_by_head(gather: GatherIndex, heads: int, chunk_size: int) -> GatherIndex:
    index = gather.index.view(-1, 1, chunk_size)
    head = torch.arange(heads, device=index.device)
    counts = gather.ptr.diff()
    # A row's positions stand together; now those of its first head come first, then those of its second.
    position = torch.arange(len(gather.positions), device=index.device)
    moved = (position + (heads - 1) * gather.ptr[:-1].repeat_interleave(counts))[:, None]
    moved = moved + counts.repeat_interleave(counts)[:, None] * head
    positions = torch.empty_like(moved).flatten()
    positions[moved.flatten()] = positions_by_head(gather.positions, heads, chunk_size).flatten()
    return GatherIndex(
        index=torch.where(index < 0, -1, index * heads + head[:, None]).flatten(),
        ptr=torch.nn.functional.pad(counts.repeat_interleave(heads).cumsum(0), (1, 0)),
        positions=positions,
    )


def _levels(
    level_ptr: tuple[int, ...], num_kept: list[int], parent: torch.Tensor, exported: torch.Tensor
) -> list[Level]:
    export_order = exported.argsort(stable=True)
    export_ptr = torch.searchsorted(exported[export_order], torch.tensor(level_ptr, device=parent.device)).tolist()
    levels = []
    for level, (start, stop) in enumerate(pairwise(level_ptr)):
        exports = export_order[export_ptr[level] : export_ptr[level + 1]]
        levels.append(
            Level(
                start=start,
                kept_stop=start + num_kept[level],
                stop=stop,
                parents=parent[start:stop] - level_ptr[max(0, level - 1)],
                exports=exports,
                exported=exported[exports] - start,
            )
        )
    return levels
