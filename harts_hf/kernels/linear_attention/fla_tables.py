"""The chunk tree as Flash Linear Attention's kernels see it: chains of nodes packed as variable-length sequences.

Only the last node of a chain can be shorter than a chunk (whatever starts from a node begins at a chunk boundary), so
a chain *is* an ordinary sequence for every chunk-parallel stage. Chains stand in preorder of their first nodes: on a
tree whose branches lie at chunk boundaries the packed order is then the compact order.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch

from harts_hf.batch import GatherIndex, LinearTables, Tables
from harts_hf.planner.linear_calls import decompose_chains
from harts_hf.tree import IntArray


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedChains(Tables):
    """``M`` chunk nodes packed as ``Q`` chains over ``P`` rows, with ``S`` state slots.

    Slots hold fp32 states: first the boundary states handed in, then the outgoing states that some other chain starts
    from or that the caller exports.

    Attributes:
        gather: ``P`` places over the ``E + N`` rows.
        output: ``[N]`` int64, the place of each own row's output.
        output_reader: ``[P]`` int64, the own row that takes its output from a place, or -1.
        output_is_identity: every place is the own row of the same number.
        starts_from_nothing: ``[E + N]`` int8, 1 where a row is the first of a chain that starts from no state (its
            gate multiplies a zero state, so its gate's gradient is exactly 0).
        cu_seqlens: ``[Q + 1]`` int64 row offsets of the chains.
        chunk_indices: ``[M, 2]`` int64, chain and position in it of each packed node.
        first_node: ``[Q]`` int64, the packed number of each chain's first node.
        start_slot: ``[Q]`` int32 slot that each chain starts from, -1 for a zero state.
        node_slot: ``[M]`` int32 slot of each packed node's outgoing state, -1 where nobody reads it.
        chains_by_round: ``[Q]`` int32, chains ordered by round, longest first within a round.
        round_ptr: offsets of the rounds in ``chains_by_round`` (host integers).
        round_nodes: nodes of each round, and ``round_longest``: of its longest chain (host integers).
        slots_by_round: slots in the order in which their gradients become complete: those that chains of round 0 start
            from, then of round 1, ...
        slot_round_ptr: offsets of the rounds in ``slots_by_round``.
        slot_ptr: ``[S + 1]`` int64 CSR of the chains that start from each slot.
        slot_chains: those chains, ascending.
        export_slot: ``[X]`` int64 slot of each exported node.
        num_initial: number of boundary states handed in.
        num_slots: S.
        chunk_size: C.
    """

    gather: GatherIndex
    output: torch.Tensor
    output_reader: torch.Tensor
    output_is_identity: bool
    starts_from_nothing: torch.Tensor
    cu_seqlens: torch.Tensor
    chunk_indices: torch.Tensor
    first_node: torch.Tensor
    start_slot: torch.Tensor
    node_slot: torch.Tensor
    chains_by_round: torch.Tensor
    round_ptr: tuple[int, ...]
    round_nodes: tuple[int, ...]
    round_longest: tuple[int, ...]
    slots_by_round: torch.Tensor
    slot_round_ptr: tuple[int, ...]
    slot_ptr: torch.Tensor
    slot_chains: torch.Tensor
    export_slot: torch.Tensor
    num_initial: int
    num_slots: int
    chunk_size: int

    @property
    def num_rounds(self) -> int:
        """Launches of a state kernel, at most the tree's fewest sequential calls."""
        return len(self.round_ptr) - 1

    @property
    def num_nodes(self) -> int:
        """M."""
        return len(self.node_slot)

    @property
    def num_chains(self) -> int:
        """Q."""
        return len(self.start_slot)

    @property
    def num_places(self) -> int:
        """P."""
        return len(self.output_reader)


@dataclass(frozen=True, eq=False)
class _Form:
    exports: ref[torch.Tensor] | None  # compared by identity: reading the numbers would wait for the device
    num_initial: int
    packed: PackedChains


_cache: WeakKeyDictionary[LinearTables, list[_Form]] = WeakKeyDictionary()


def packed_chains(tables: LinearTables, export_nodes: torch.Tensor, num_initial: int) -> PackedChains:
    """The packed form of ``tables``, built on first use and kept as long as ``tables`` lives.

    Args:
        tables: tables of one microbatch.
        export_nodes: ``[X]`` nodes whose outgoing states the caller wants; hand in the same tensor for every layer,
            and do not change it in place.
        num_initial: number of boundary states that the caller hands in.
    """
    forms = _cache.setdefault(tables, [])
    for form in forms:
        same = len(export_nodes) == 0 if form.exports is None else form.exports() is export_nodes
        if same and form.num_initial == num_initial:
            return form.packed
    packed = build_packed_chains(tables, _host(export_nodes), num_initial)
    forms[:] = [form for form in forms if form.exports is None or form.exports() is not None]
    forms.append(_Form(ref(export_nodes) if len(export_nodes) else None, num_initial, packed))
    return packed


def build_packed_chains(tables: LinearTables, exports: IntArray, num_initial: int) -> PackedChains:
    """Packs the nodes of ``tables``; see :class:`PackedChains`."""
    size, num_nodes = tables.chunk_size, tables.num_nodes
    parent, lengths = _host(tables.parent), _host(tables.lengths)
    chains = decompose_chains(parent)
    order, chain_start = _preorder_of_chains(chains.head)
    heads = order[chain_start]
    counts = np.diff(np.append(chain_start, num_nodes))
    place_of_node = np.zeros(num_nodes + 1, np.int64)
    np.cumsum(lengths[order], out=place_of_node[1:])
    rounds = chains.call[heads]
    slots = _slots(parent, heads, order, _host(tables.initial)[heads], exports, num_initial)
    rows = _host(tables.gather.index).reshape(num_nodes, size)[order]
    rows = rows[np.arange(size) < lengths[order][:, None]]
    packed_number = np.empty(num_nodes, np.int64)
    packed_number[order] = np.arange(num_nodes)
    owner, owner_slot = np.divmod(_host(tables.output.index), size)
    output = place_of_node[packed_number[owner]] + owner_slot
    reader = np.full(len(rows), -1, np.int64)
    reader[output] = np.arange(len(output))
    nothing = np.zeros(tables.gather.num_rows, np.int8)
    nothing[rows[place_of_node[chain_start[slots.start_slot < 0]]]] = 1
    chain_of_node = np.repeat(np.arange(len(heads)), counts)
    by_round = np.lexsort((-counts, rounds))
    slot_round = np.full(slots.num_slots, -1, np.int64)
    started = slots.start_slot >= 0
    slot_round[slots.start_slot[started]] = rounds[started]
    num_rounds = chains.num_calls
    slot_order = np.argsort(slot_round, kind="stable")
    readers = GatherIndex.build(slots.start_slot, slots.num_slots)
    host = PackedChains(
        gather=GatherIndex.build(rows, tables.gather.num_rows),
        output=torch.from_numpy(output),
        output_reader=torch.from_numpy(reader),
        output_is_identity=len(rows) == len(output) and bool((output == np.arange(len(rows))).all()),
        starts_from_nothing=torch.from_numpy(nothing),
        cu_seqlens=torch.from_numpy(np.append(place_of_node[chain_start], place_of_node[-1])),
        chunk_indices=torch.from_numpy(
            np.stack([chain_of_node, np.arange(num_nodes) - chain_start[chain_of_node]], axis=1)
        ),
        first_node=torch.from_numpy(chain_start),
        start_slot=torch.from_numpy(slots.start_slot.astype(np.int32)),
        node_slot=torch.from_numpy(slots.node_slot[order].astype(np.int32)),
        chains_by_round=torch.from_numpy(by_round.astype(np.int32)),
        round_ptr=tuple(np.searchsorted(rounds[by_round], np.arange(num_rounds + 1)).tolist()),
        round_nodes=tuple(int(counts[rounds == index].sum()) for index in range(num_rounds)),
        round_longest=tuple(int(counts[rounds == index].max()) for index in range(num_rounds)),
        slots_by_round=torch.from_numpy(slot_order.astype(np.int32)),
        slot_round_ptr=tuple(np.searchsorted(slot_round[slot_order], np.arange(num_rounds + 1)).tolist()),
        slot_ptr=readers.ptr,
        slot_chains=readers.places.int(),
        export_slot=torch.from_numpy(slots.node_slot[exports]),
        num_initial=num_initial,
        num_slots=slots.num_slots,
        chunk_size=size,
    )
    return host.to(tables.parent.device)


@dataclass(frozen=True, eq=False)
class _Slots:
    start_slot: IntArray  # [Q]
    node_slot: IntArray  # [M], by the tables' node numbers
    num_slots: int


def _slots(
    parent: IntArray, heads: IntArray, order: IntArray, initial: IntArray, exports: IntArray, num_initial: int
) -> _Slots:
    above = parent[heads]
    kept = np.zeros(len(parent), bool)
    kept[above[above >= 0]] = True
    kept[exports] = True
    kept_nodes = order[kept[order]]
    node_slot = np.full(len(parent), -1, np.int64)
    node_slot[kept_nodes] = num_initial + np.arange(len(kept_nodes))
    return _Slots(np.where(above >= 0, node_slot[above], initial), node_slot, num_initial + len(kept_nodes))


def _preorder_of_chains(head: IntArray) -> tuple[IntArray, IntArray]:
    """Nodes ordered by chain (chains by first node, nodes downward), and where each chain starts."""
    order = np.argsort(head, kind="stable")
    starts = np.flatnonzero(np.diff(head[order], prepend=-1))
    return order, starts


def _host(tensor: torch.Tensor) -> IntArray:
    return tensor.cpu().numpy()
