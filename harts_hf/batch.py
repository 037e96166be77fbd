"""A planned microbatch as tensors: the only bridge from plan to tensors.

Index spaces. *Own rows* ``0..N-1`` are the rows that the network computes, in preorder. Each kind of layer may also
read rows handed over by trunks; those stand **before** the own rows in that layer's own index space (``E`` handed
rows, then the ``N`` own ones), so a kernel is given the concatenated tensor and needs no second code path.
"""

from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import torch

from harts_hf.planner.chunks import CHUNK_SIZE, ChunkTree, build_chunk_tree
from harts_hf.planner.schedule import Microbatch
from harts_hf.tree import IntArray, RolloutTree


class _Tensors:
    """Tables that move between devices together."""

    def to(self, device: torch.device | str) -> Self:
        """The same tables on ``device``."""
        moved = {
            f.name: value.to(device) if isinstance(value := getattr(self, f.name), torch.Tensor | _Tensors) else value
            for f in fields(self)  # type: ignore[arg-type]
        }
        return type(self)(**moved)


@dataclass(frozen=True, eq=False, kw_only=True)
class GatherIndex(_Tensors):
    """Which rows to read, and for the backward where each row was read (CSR), so that sums have a fixed order.

    Attributes:
        index: ``[P]`` int64, the row to read at each place; -1 reads zeros.
        ptr: ``[R + 1]`` int64 offsets into ``places``.
        places: ``[ptr[-1]]`` int64, the places that read each of the ``R`` rows, ascending within a row.
    """

    index: torch.Tensor
    ptr: torch.Tensor
    places: torch.Tensor

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.ptr) - 1

    @classmethod
    def build(cls, index: IntArray, num_rows: int) -> "GatherIndex":
        """From ``index`` [P] (values -1..num_rows-1) over ``num_rows`` rows."""
        places = np.argsort(index, kind="stable")[np.count_nonzero(index < 0) :]
        ptr = np.zeros(num_rows + 1, np.int64)
        np.cumsum(np.bincount(index[index >= 0], minlength=num_rows), out=ptr[1:])
        return cls(index=_tensor(index), ptr=_tensor(ptr), places=_tensor(places))


@dataclass(frozen=True, eq=False, kw_only=True)
class LinearTables(_Tensors):
    """How a linear-attention layer walks the chunk tree of a microbatch of ``N`` own rows (``M`` chunk nodes).

    Attributes:
        gather: ``M * C`` places over ``E + N`` post-convolution rows: place ``m * C + s`` is slot ``s`` of node ``m``.
        output: ``N`` places over ``M * C``: where each own row's output is taken from.
        lengths: ``[M]`` rows of each node, 1 to C; the slots after them are empty.
        parent: ``[M]`` the node whose outgoing state a node starts from (always a smaller number), -1 for none.
        initial: ``[M]`` the boundary state a node starts from (a row of ``initial_states``), -1 for none.
        level_nodes: ``[M]`` the nodes ordered by level, ascending within a level.
        level_ptr: offsets of the levels in ``level_nodes`` (host integers); nodes of a level start from states of
            earlier levels only.
        child_ptr: ``[M + 1]`` CSR of the nodes that start from each node's outgoing state.
        children: ``[child_ptr[-1]]`` those nodes, ascending.
        has_child: ``[M]`` bool, whether anything in this microbatch starts from the node's outgoing state.
        chunk_size: C.
    """

    gather: GatherIndex
    output: GatherIndex
    lengths: torch.Tensor
    parent: torch.Tensor
    initial: torch.Tensor
    level_nodes: torch.Tensor
    level_ptr: tuple[int, ...]
    child_ptr: torch.Tensor
    children: torch.Tensor
    has_child: torch.Tensor
    chunk_size: int

    @property
    def num_nodes(self) -> int:
        """M."""
        return len(self.parent)

    @property
    def num_rows(self) -> int:
        """N."""
        return len(self.output.index)

    @classmethod
    def build(cls, chunks: ChunkTree, own_rows: IntArray) -> "LinearTables":
        """From the chunk tree over ``E + N`` rows.

        Args:
            chunks: over the handed and own rows together.
            own_rows: ``[N]`` which of them are own, ascending; handed rows are moved before them, in order.

        Boundary states are numbered in the order of ``chunks.entry_row`` as np.unique gives it.
        """
        num_all, size = len(chunks.owner), chunks.chunk_size
        is_own = np.zeros(num_all, bool)
        is_own[own_rows] = True
        new_number = np.empty(num_all + 1, np.int64)
        new_number[np.concatenate([np.flatnonzero(~is_own), own_rows])] = np.arange(num_all)
        new_number[-1] = -1
        entries = np.unique(chunks.entry_row[chunks.entry_row >= 0])
        initial = np.where(chunks.entry_row >= 0, np.searchsorted(entries, chunks.entry_row), -1)
        order = np.argsort(chunks.level, kind="stable")
        level_ptr = np.searchsorted(chunks.level[order], np.arange(chunks.level.max() + 2))
        children = GatherIndex.build(chunks.parent, chunks.num_nodes)
        return cls(
            gather=GatherIndex.build(new_number[chunks.rows.ravel()], num_all),
            output=GatherIndex.build(
                chunks.owner[own_rows] * size + chunks.owner_slot[own_rows], chunks.num_nodes * size
            ),
            lengths=_tensor(chunks.lengths),
            parent=_tensor(chunks.parent),
            initial=_tensor(initial),
            level_nodes=_tensor(order),
            level_ptr=tuple(level_ptr.tolist()),
            child_ptr=children.ptr,
            children=children.places,
            has_child=children.ptr[1:] > children.ptr[:-1],
            chunk_size=size,
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class ConvTable(_Tensors):
    """Ancestors that a causal convolution of width ``W`` reads, over ``E + N`` pre-convolution rows.

    Attributes:
        gather: ``N * W`` places: place ``n * W + w`` is the row that weight ``w`` of own row ``n`` multiplies: the row
            itself at ``w = W - 1``, its parent at ``W - 2``, ...; -1 above the root.
        width: W.
    """

    gather: GatherIndex
    width: int

    @property
    def ancestors(self) -> torch.Tensor:
        """``[N, W]`` the places as a table."""
        return self.gather.index.view(-1, self.width)


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionIntervals(_Tensors):
    """Row ``q`` sees key ``k`` if and only if ``lo[k] <= q < hi[k]``; keys are ``E`` handed ones, then the ``N`` own.

    Attributes:
        lo: ``[E + N]`` int32.
        hi: ``[E + N]`` int32.
    """

    lo: torch.Tensor
    hi: torch.Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class LabelTable(_Tensors):
    """The labels that a microbatch scores.

    Attributes:
        rows: ``[P]`` own row that predicts each label, ascending.
        token_ids: ``[P]`` the label.
        tree_rows: ``[P]`` row of the tree whose token the label is (its log-prob is ``logp[tree_rows]``).
    """

    rows: torch.Tensor
    token_ids: torch.Tensor
    tree_rows: torch.Tensor


class TreeBatch:
    """One microbatch for one model forward: ``model(batch.input_ids, position_ids=batch.position_ids, harts=batch)``.

    A plain object on purpose: FSDP casts and copies tensors that it finds in dicts and dataclasses.

    Attributes:
        input_ids: ``[1, N]`` int64.
        position_ids: ``[1, N]`` int64, depth in the tree.
        occurrence_counts: ``[1, N]`` int64, trajectories through each row; 0 where another microbatch owns the row.
        labels: what is scored here.
        attention: intervals for full attention.
        linear: tables for linear attention.
        conv: a :class:`ConvTable` by width; built on first use.
    """

    def __init__(self, tree: RolloutTree, microbatch: Microbatch, chunk_size: int = CHUNK_SIZE) -> None:
        rows = microbatch.rows
        if len(microbatch.prefix):
            raise NotImplementedError("states handed over by trunk microbatches")
        position = np.full(tree.num_tokens + 1, -1, np.int64)
        position[rows] = np.arange(len(rows))
        parent = position[tree.parent[rows]]
        depth = tree.depth[rows]
        if ((parent < 0) & (depth > 0)).any():
            raise ValueError("expected rows closed under parent, got a row whose parent is missing")
        self.microbatch = microbatch
        self.input_ids = _tensor(tree.token_ids[rows])[None]
        self.position_ids = _tensor(depth)[None]
        self.occurrence_counts = _tensor(np.where(microbatch.owned, tree.occurrence_counts[rows], 0))[None]
        self.attention = AttentionIntervals(
            lo=torch.arange(len(rows), dtype=torch.int32),
            hi=_tensor(np.searchsorted(rows, tree.subtree_end[rows])).int(),
        )
        chunks = build_chunk_tree(parent, depth, chunk_size)
        self.linear = LinearTables.build(chunks, np.arange(len(rows)))
        self.labels = _labels(tree, microbatch, position)
        self._parent = parent
        self._conv: dict[int, ConvTable] = {}

    @property
    def num_rows(self) -> int:
        """N."""
        return self.input_ids.shape[1]

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.input_ids.device

    def conv(self, width: int) -> ConvTable:
        """The ancestor table of a causal convolution of ``width`` taps."""
        if width not in self._conv:
            columns = [np.arange(self.num_rows)]
            for _ in range(width - 1):
                columns.append(np.append(self._parent, -1)[columns[-1]])
            index = np.stack(columns[::-1], axis=1).ravel()
            self._conv[width] = ConvTable(gather=GatherIndex.build(index, self.num_rows), width=width).to(self.device)
        return self._conv[width]

    def to(self, device: torch.device | str) -> "TreeBatch":
        """Moves every tensor to ``device``, in place."""
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor | _Tensors):
                setattr(self, name, value.to(device))
        self._conv = {width: table.to(device) for width, table in self._conv.items()}
        return self


def _labels(tree: RolloutTree, microbatch: Microbatch, position: IntArray) -> LabelTable:
    """Labels of owned rows: the tokens directly below them, wherever those are computed."""
    owner = np.full(tree.num_tokens + 1, -1, np.int64)
    owned_rows = microbatch.rows[microbatch.owned]
    owner[owned_rows] = position[owned_rows]
    predictor = owner[tree.parent]
    tree_rows = np.flatnonzero(predictor >= 0)
    tree_rows = tree_rows[np.argsort(predictor[tree_rows], kind="stable")]
    return LabelTable(
        rows=_tensor(predictor[tree_rows]), token_ids=_tensor(tree.token_ids[tree_rows]), tree_rows=_tensor(tree_rows)
    )


def _tensor(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(array))  # a copy: arrays of a tree are read-only, which torch warns about
