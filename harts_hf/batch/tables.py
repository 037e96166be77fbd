"""Tables that kernels read, as tensors.

Index spaces. *Own rows* ``0..N-1`` are the rows that the network computes, in preorder. Each kind of layer may also
read rows handed over by trunks; those stand **before** the own rows in that layer's own index space (``E`` handed
rows, then the ``N`` own ones), so a kernel is given the concatenated tensor and needs no second code path.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from harts_hf.planner.chunks import ChunkTree
from harts_hf.planner.spans import sorted_unique
from harts_hf.tree import IntArray

# Bytes that tables copied together start at multiples of, as PyTorch's allocator has it for tensors of their own.
ALIGNMENT = 512


class Tables:
    """Tables that move between devices together."""

    def to(self, device: torch.device | str) -> Self:
        """The same tables on ``device``, with :attr:`host`; a GPU gets them by one copy, which is not waited for."""
        found: Self = _rebuilt(self, iter(moved_together(_tensors_of(self), device)))
        return found

    @property
    def host(self) -> Self:
        """The tables that these were moved from, for what is derived on the CPU: reading a GPU's would wait for it."""
        return getattr(self, "_host", self)


def moved_together(tensors: Sequence[torch.Tensor], device: torch.device | str) -> list[torch.Tensor]:
    """Each tensor on ``device``; those that a GPU gets from the CPU are parts of one copy, which is not waited for.

    Only a copy from pinned memory runs beside the CPU, and a microbatch has some sixty tables.
    """
    to_gpu = torch.device(device).type == "cuda" and torch.cuda.is_available()
    is_copied = [to_gpu and tensor.device.type == "cpu" for tensor in tensors]
    if not any(is_copied):
        return [tensor.to(device) for tensor in tensors]
    copied = [tensor for tensor, is_one in zip(tensors, is_copied, strict=True) if is_one]
    buffer, places = packed(copied, pinned=True)
    copies = iter(unpacked(buffer.to(device, non_blocking=True), places))  # PyTorch keeps the buffer until it has run
    return [next(copies) if is_one else tensor.to(device) for tensor, is_one in zip(tensors, is_copied, strict=True)]


def read_together(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each tensor on the CPU; those of a GPU by one copy for each dtype, which is waited for once."""
    found = [tensor if tensor.is_cuda else tensor.cpu() for tensor in tensors]
    kinds = {(tensor.device, tensor.dtype) for tensor in tensors if tensor.is_cuda}
    for device, dtype in kinds:
        numbers = [i for i, tensor in enumerate(tensors) if (tensor.device, tensor.dtype) == (device, dtype)]
        joined = torch.cat([tensors[number].reshape(-1) for number in numbers])
        copy = torch.empty(joined.shape, dtype=dtype, pin_memory=True).copy_(joined, non_blocking=True)
        parts = copy.split([tensors[number].numel() for number in numbers])
        for number, part in zip(numbers, parts, strict=True):
            found[number] = part.view(tensors[number].shape)
    for device in {device for device, _ in kinds}:
        torch.cuda.current_stream(device).synchronize()
    return found


class _Place(NamedTuple):
    start: int
    dtype: torch.dtype
    shape: torch.Size


def packed(tensors: Sequence[torch.Tensor], *, pinned: bool = False) -> tuple[torch.Tensor, list[_Place]]:
    """Tensors of the CPU as bytes, each from a multiple of :data:`ALIGNMENT` on, and where each of them is."""
    places, end = [], 0
    for tensor in tensors:
        places.append(_Place(end, tensor.dtype, tensor.shape))
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    buffer = torch.empty(end, dtype=torch.uint8, pin_memory=pinned)
    if tensors:
        torch._foreach_copy_(unpacked(buffer, places), list(tensors))
    return buffer, places


def unpacked(buffer: torch.Tensor, places: list[_Place]) -> list[torch.Tensor]:
    """The tensors that :func:`packed` has put together, as views."""
    typed = {dtype: buffer.view(dtype) for dtype in {place.dtype for place in places}}
    views = []
    for start, dtype, shape in places:
        view = typed[dtype].narrow(0, start // dtype.itemsize, shape.numel())
        views.append(view if len(shape) == 1 else view.view(shape))
    return views


def _tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in _parts(value) for tensor in _tensors_of(part)]


def _rebuilt(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """``value`` with the next tensors in place of its own; tables know what they were made from."""
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, tuple):
        return tuple(_rebuilt(part, tensors) for part in value)
    if isinstance(value, dict):
        return {key: _rebuilt(part, tensors) for key, part in value.items()}
    if not isinstance(value, Tables):
        return value
    made = type(value)(**{f.name: _rebuilt(getattr(value, f.name), tensors) for f in fields(value)})  # type: ignore[arg-type]
    object.__setattr__(made, "_host", value.host)
    return made


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Tables):
        return [getattr(value, f.name) for f in fields(value)]  # type: ignore[arg-type]
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, tuple) else []


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
        ptr = np.cumsum(np.bincount(index + 1, minlength=num_rows + 1))
        num_without = int(ptr[0])
        positions = np.argsort(index, kind="stable")[num_without:]
        ptr -= num_without
        return cls(index=as_tensor(index), ptr=as_tensor(ptr), positions=as_tensor(positions))


@dataclass(frozen=True, eq=False, kw_only=True)
class LinearTables(Tables):
    """How a linear-attention layer walks the chunk tree of a microbatch of ``N`` own rows (``M`` chunk nodes).

    Attributes:
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
        slot_rows: ``[M * C]`` int64 of NumPy, the row, of ``E + N`` post-convolution ones, at slot ``s`` of node ``m``
            (entry ``m * C + s``); -1 in empty slots.
        row_slots: ``[N]`` int64 of NumPy, the entry of those that each own row's output is taken from.
        num_read: E + N.
    """

    lengths: torch.Tensor
    parent: torch.Tensor
    initial: torch.Tensor
    level_nodes: torch.Tensor
    level_ptr: tuple[int, ...]
    child_ptr: torch.Tensor
    children: torch.Tensor
    has_child: torch.Tensor
    chunk_size: int
    slot_rows: IntArray
    row_slots: IntArray
    num_read: int

    @property
    def num_nodes(self) -> int:
        """M."""
        return len(self.parent)

    @property
    def num_rows(self) -> int:
        """N."""
        return len(self.row_slots)

    # On a GPU nobody asks for these two: kernels there read packed chains. They are no fields: `dataclasses.replace`
    # does not take along what was made of these tables.
    @cached_property
    def gather(self) -> GatherIndex:
        """``M * C`` positions over the ``E + N`` rows, as :attr:`slot_rows` has them."""
        return GatherIndex.build(self.slot_rows, self.num_read).to(self.parent.device)

    @cached_property
    def output(self) -> GatherIndex:
        """``N`` positions over ``M * C``, as :attr:`row_slots` has them."""
        return GatherIndex.build(self.row_slots, self.num_nodes * self.chunk_size).to(self.parent.device)

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
        slot_rows, row_slots = chunks.rows.ravel(), chunks.owner * size + chunks.owner_slot
        if len(own_rows) < num_all:
            is_own = np.zeros(num_all, bool)
            is_own[own_rows] = True
            new_number = np.empty(num_all + 1, np.int64)
            new_number[np.concatenate([np.flatnonzero(~is_own), own_rows])] = np.arange(num_all)
            new_number[-1] = -1
            slot_rows, row_slots = new_number[slot_rows], row_slots[own_rows]
        keys = chunks.entry_row if entry_keys is None else entry_keys
        is_entry = chunks.entry_row >= 0
        initial = np.where(is_entry, np.searchsorted(sorted_unique(keys[is_entry]), keys), -1)
        order = np.argsort(chunks.level, kind="stable")
        level_ptr = np.searchsorted(chunks.level[order], np.arange(chunks.level.max() + 2))
        children = GatherIndex.build(chunks.parent, chunks.num_nodes)
        return cls(
            lengths=as_tensor(chunks.lengths),
            parent=as_tensor(chunks.parent),
            initial=as_tensor(initial),
            level_nodes=as_tensor(order),
            level_ptr=tuple(level_ptr.tolist()),
            child_ptr=children.ptr,
            children=children.positions,
            has_child=children.ptr[1:] > children.ptr[:-1],
            chunk_size=size,
            slot_rows=slot_rows,
            row_slots=row_slots,
            num_read=num_all,
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
        """The part where ``wanted`` ``[P]`` (bool, on the CPU) says so, chosen there and moved to where this is."""
        kept = wanted.nonzero().squeeze(1)
        chosen = type(self)(**{f.name: getattr(self.host, f.name)[kept] for f in fields(self)})
        return chosen if self.host is self else chosen.to(self.rows.device)

    def none(self) -> Self:
        """The table without any of its rows."""
        made = type(self)(**{f.name: getattr(self, f.name)[:0] for f in fields(self)})
        if self.host is not self:
            object.__setattr__(made, "_host", self.host.none())
        return made


@dataclass(frozen=True, eq=False, kw_only=True)
class LabelTable(RowTable):
    """The labels that a microbatch scores: tokens directly below its rows.

    Attributes:
        rows: ``[P]`` own row that predicts each label, ascending.
        tree_rows: ``[P]`` row of the tree whose token the label is (its log-prob is ``logp[tree_rows]``).
        token_ids: ``[P]`` the label.
    """

    token_ids: torch.Tensor


def as_tensor(array: IntArray) -> torch.Tensor:
    """A tensor of an array that nobody else writes to, with a copy of its numbers where they may be somebody's.

    Arrays of a tree are read-only, which torch warns about; views are of arrays that live on.
    """
    is_own = array.flags.writeable and array.flags.owndata
    return torch.from_numpy(array if is_own else np.array(array))
