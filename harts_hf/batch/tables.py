"""Tables that kernels read, as tensors.

Index spaces. *Own rows* ``0..N-1`` are the rows that the network computes, in preorder. Each kind of layer may also
read rows handed over by trunks; those stand **before** the own rows in that layer's own index space (``E`` handed
rows, then the ``N`` own ones), so a kernel is given the concatenated tensor and needs no second code path.
"""

from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import torch

from harts_hf.planner.chunks import ChunkTree
from harts_hf.tree import IntArray


class Tables:
    """Tables that move between devices together."""

    def to(self, device: torch.device | str) -> Self:
        """The same tables on ``device``, with :attr:`host`; a GPU's copies are not waited for."""
        moved = type(self)(**{f.name: _move(getattr(self, f.name), device) for f in fields(self)})  # type: ignore[arg-type]
        object.__setattr__(moved, "_host", self.host)
        return moved

    @property
    def host(self) -> Self:
        """The tables that these were moved from, for what is derived on the CPU: reading a GPU's would wait for it."""
        return getattr(self, "_host", self)


def _move(value: Any, device: torch.device | str) -> Any:
    if isinstance(value, tuple):
        return tuple(_move(one, device) for one in value)
    if isinstance(value, dict):
        return {key: _move(one, device) for key, one in value.items()}
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and torch.device(device).type == "cuda":
        # From pinned memory the copy runs beside the CPU; PyTorch keeps that memory until it has.
        return (value.pin_memory() if torch.cuda.is_available() else value).to(device, non_blocking=True)
    return value.to(device) if isinstance(value, torch.Tensor | Tables) else value


@dataclass(frozen=True, eq=False, kw_only=True)
class GatherIndex(Tables):
    """Which rows to read, and for the backward where each row was read (CSR), so that sums have a fixed order.

    Attributes:
        index: ``[P]`` int64, the row to read at each position; -1 reads zeros.
        ptr: ``[R + 1]`` int64 offsets into ``positions``.
        positions: ``[ptr[-1]]`` int64, the positions that read each of the ``R`` rows, ascending within a row.
    """

    index: torch.Tensor
    ptr: torch.Tensor
    positions: torch.Tensor

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.ptr) - 1

    @classmethod
    def build(cls, index: IntArray, num_rows: int) -> "GatherIndex":
        """From ``index`` [P] (values -1..num_rows-1) over ``num_rows`` rows."""
        positions = np.argsort(index, kind="stable")[np.count_nonzero(index < 0) :]
        ptr = np.zeros(num_rows + 1, np.int64)
        np.cumsum(np.bincount(index[index >= 0], minlength=num_rows), out=ptr[1:])
        return cls(index=as_tensor(index), ptr=as_tensor(ptr), positions=as_tensor(positions))


@dataclass(frozen=True, eq=False, kw_only=True)
class LinearTables(Tables):
    """How a linear-attention layer walks the chunk tree of a microbatch of ``N`` own rows (``M`` chunk nodes).

    Attributes:
        gather: ``M * C`` positions over ``E + N`` post-convolution rows: ``m * C + s`` is slot ``s`` of node ``m``.
        output: ``N`` positions over ``M * C``: where each own row's output is taken from.
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
    def build(cls, chunks: ChunkTree, own_rows: IntArray, entry_keys: IntArray | None = None) -> "LinearTables":
        """From the chunk tree over ``E + N`` rows.

        Args:
            chunks: over the handed and own rows together.
            own_rows: ``[N]`` which of them are own, ascending; handed rows are moved before them, in order.
            entry_keys: ``[M]`` for each node with an entry row a number of the boundary state it starts from (nodes
                that start from one state share it); ``chunks.entry_row`` if None. Boundary states stand in ascending
                order of their numbers.
        """
        num_all, size = len(chunks.owner), chunks.chunk_size
        is_own = np.zeros(num_all, bool)
        is_own[own_rows] = True
        new_number = np.empty(num_all + 1, np.int64)
        new_number[np.concatenate([np.flatnonzero(~is_own), own_rows])] = np.arange(num_all)
        new_number[-1] = -1
        keys = chunks.entry_row if entry_keys is None else entry_keys
        is_entry = chunks.entry_row >= 0
        initial = np.where(is_entry, np.searchsorted(np.unique(keys[is_entry]), keys), -1)
        order = np.argsort(chunks.level, kind="stable")
        level_ptr = np.searchsorted(chunks.level[order], np.arange(chunks.level.max() + 2))
        children = GatherIndex.build(chunks.parent, chunks.num_nodes)
        return cls(
            gather=GatherIndex.build(new_number[chunks.rows.ravel()], num_all),
            output=GatherIndex.build(
                chunks.owner[own_rows] * size + chunks.owner_slot[own_rows], chunks.num_nodes * size
            ),
            lengths=as_tensor(chunks.lengths),
            parent=as_tensor(chunks.parent),
            initial=as_tensor(initial),
            level_nodes=as_tensor(order),
            level_ptr=tuple(level_ptr.tolist()),
            child_ptr=children.ptr,
            children=children.positions,
            has_child=children.ptr[1:] > children.ptr[:-1],
            chunk_size=size,
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class ConvTable(Tables):
    """Ancestors that a causal convolution of width ``W`` reads, over ``E + N`` pre-convolution rows.

    Attributes:
        gather: ``N * W`` positions: ``n * W + w`` is the row that weight ``w`` of own row ``n`` multiplies: the row
            itself at ``w = W - 1``, its parent at ``W - 2``, ...; -1 above the root.
        width: W.
    """

    gather: GatherIndex
    width: int

    @property
    def ancestors(self) -> torch.Tensor:
        """``[N, W]`` the positions as a table."""
        return self.gather.index.view(-1, self.width)


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionIntervals(Tables):
    """Row ``q`` sees key ``k`` if and only if ``lo[k] <= q < hi[k]``; keys are ``E`` handed ones, then the ``N`` own.

    Attributes:
        lo: ``[E + N]`` int32.
        hi: ``[E + N]`` int32.
    """

    lo: torch.Tensor
    hi: torch.Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class RowTable(Tables):
    """Own rows of a microbatch that something is computed of, and the rows of the tree that it belongs to.

    Attributes:
        rows: ``[P]`` own rows, ascending.
        tree_rows: ``[P]`` row of the tree that each of them is.
    """

    rows: torch.Tensor
    tree_rows: torch.Tensor

    def select(self, wanted: torch.Tensor) -> Self:
        """The part where ``wanted`` ``[P]`` (bool) says so."""
        kept = wanted.nonzero().squeeze(1)  # the one wait for a GPU
        return type(self)(**{f.name: getattr(self, f.name)[kept] for f in fields(self)})


@dataclass(frozen=True, eq=False, kw_only=True)
class LabelTable(RowTable):
    """The labels that a microbatch scores: tokens directly below its rows.

    Attributes:
        rows: ``[P]`` own row that predicts each label, ascending.
        tree_rows: ``[P]`` row of the tree whose token the label is (its log-prob is ``logp[tree_rows]``).
        token_ids: ``[P]`` the label.
    """

    token_ids: torch.Tensor


def as_tensor(array: Any) -> torch.Tensor:
    """A tensor with a copy of the array: arrays of a tree are read-only, which torch warns about."""
    return torch.from_numpy(np.array(array))
