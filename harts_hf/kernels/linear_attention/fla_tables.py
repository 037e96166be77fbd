"""The chunk tree as Flash Linear Attention's kernels see it: chains of nodes packed as variable-length sequences.

Only the last node of a chain can be shorter than a chunk (whatever starts from a node begins at a chunk boundary), so
a chain *is* an ordinary sequence for every chunk-parallel stage. Chains stand in preorder of their first nodes: on a
tree whose branches lie at chunk boundaries the packed order is then the compact order.

The rule runs *group* by group, a group being consecutive chains, and keeps what a stage hands to the next for one
group only: the states before and the gradients after each node (1 MB a node at 32 heads of 128 x 128, each) would
otherwise grow with the replayed tokens. A tree with little replay is one group.
"""

from dataclasses import dataclass
from itertools import pairwise
from weakref import ref

import numpy as np
import torch

from harts_hf.batch import GatherIndex, LinearTables, Tables
from harts_hf.kernels.caching import kept_with_table
from harts_hf.planner.linear_calls import decompose_chains
from harts_hf.tree import IntArray


@dataclass(frozen=True, eq=False, kw_only=True)
class ChainGroup(Tables):
    """Consecutive chains, ``Q`` of ``M`` nodes over ``P`` positions; numbers but slots count from the group's first.

    Chains start from slots that earlier groups, or earlier rounds of the same group, have filled.

    Attributes:
        positions: first position of the group among all, and the exclusive end (host integers).
        cu_seqlens: ``[Q + 1]`` int64 position offsets of the chains.
        chunk_indices: ``[M, 2]`` int64, chain and position in it of each node.
        first_node: ``[Q]`` int64, each chain's first node.
        start_slot: ``[Q]`` int32 slot that each chain starts from, -1 for a zero state.
        node_slot: ``[M]`` int32 slot of each node's outgoing state, -1 where nobody reads it.
        chains_by_round: ``[Q]`` int32, chains ordered by round, longest first within a round.
        round_ptr: offsets of the rounds in ``chains_by_round`` (host integers).
        round_nodes: nodes of each round, and ``round_longest``: of its longest chain (host integers).
        slots_by_round: slots that chains of round 0 start from, then of round 1, ...
        slot_round_ptr: offsets of the rounds in ``slots_by_round``.
        slot_ptr: ``[S + 1]`` int64 CSR of the chains that start from each slot.
        slot_chains: those chains, descending: groups are undone from the last one on, so the sums of a slot's
            gradients have one order however chains are grouped.
    """

    positions: tuple[int, int]
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
    def num_slots(self) -> int:
        """S, of the whole tree."""
        return len(self.slot_ptr) - 1


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedChains(Tables):
    """Chunk nodes packed as chains over ``P`` positions, with ``S`` state slots.

    Slots hold fp32 states: first the boundary states handed in, then the outgoing states that some other chain starts
    from or that the caller exports.

    Attributes:
        gather: ``P`` positions over the ``E + N`` rows.
        output: ``[N]`` int64, the position of each own row's output.
        output_reader: ``[P]`` int64, the own row that takes its output from a position, or -1.
        output_is_identity: every position is the own row of the same number.
        starts_from_nothing: ``[E + N]`` int8, 1 where a row is the first of a chain that starts from no state (its
            gate multiplies a zero state, so its gate's gradient is exactly 0).
        groups: in the order in which the forward runs them.
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
    groups: tuple[ChainGroup, ...]
    export_slot: torch.Tensor
    num_initial: int
    num_slots: int
    chunk_size: int

    @property
    def num_positions(self) -> int:
        """P."""
        return len(self.output_reader)


@dataclass(frozen=True, eq=False)
class _Form:
    exports: ref[torch.Tensor] | None  # compared by identity: reading the numbers would wait for the device
    num_initial: int
    packed: PackedChains


@kept_with_table
def _forms(tables: LinearTables) -> list[_Form]:
    return []


def packed_chains(tables: LinearTables, export_nodes: torch.Tensor, num_initial: int) -> PackedChains:
    """The packed form of ``tables``, built on first use and kept as long as ``tables`` lives.

    Args:
        tables: tables of one microbatch.
        export_nodes: ``[X]`` nodes whose outgoing states the caller wants; hand in the same tensor for every layer,
            and do not change it in place.
        num_initial: number of boundary states that the caller hands in.
    """
    forms = _forms(tables)
    for form in forms:
        same = len(export_nodes) == 0 if form.exports is None else form.exports() is export_nodes
        if same and form.num_initial == num_initial:
            return form.packed
    packed = build_packed_chains(tables, _host(export_nodes), num_initial)
    forms[:] = [form for form in forms if form.exports is None or form.exports() is not None]
    forms.append(_Form(ref(export_nodes) if len(export_nodes) else None, num_initial, packed))
    return packed


def build_packed_chains(
    tables: LinearTables, exports: IntArray, num_initial: int, *, group_size: int | None = None
) -> PackedChains:
    """Packs the nodes of ``tables``; see :class:`PackedChains`.

    Args:
        tables: of one microbatch.
        exports: ``[X]`` nodes whose outgoing states the caller wants.
        num_initial: number of boundary states.
        group_size: nodes and starting chains that a group may have (one chain may always); None for
            :func:`default_group_size`.
    """
    device, tables = tables.parent.device, tables.host
    size, num_nodes = tables.chunk_size, tables.num_nodes
    parent, lengths = _host(tables.parent), _host(tables.lengths)
    chains = decompose_chains(parent)
    order, chain_start = _preorder_of_chains(chains.head)
    counts = np.diff(np.append(chain_start, num_nodes))
    position_of_node = np.zeros(num_nodes + 1, np.int64)
    np.cumsum(lengths[order], out=position_of_node[1:])
    slots = _slots(parent, order[chain_start], order, _host(tables.initial)[order[chain_start]], exports, num_initial)
    rows = tables.slot_rows.reshape(num_nodes, size)[order]
    rows = rows[np.arange(size) < lengths[order][:, None]]
    packed_number = np.empty(num_nodes, np.int64)
    packed_number[order] = np.arange(num_nodes)
    owner, owner_slot = np.divmod(tables.row_slots, size)
    output = position_of_node[packed_number[owner]] + owner_slot
    reader = np.full(len(rows), -1, np.int64)
    reader[output] = np.arange(len(output))
    nothing = np.zeros(tables.num_read, np.int8)
    nothing[rows[position_of_node[chain_start[slots.start_slot < 0]]]] = 1
    weights = counts + (slots.start_slot >= 0)
    limit = default_group_size(int(weights.sum()), tables.num_rows, size) if group_size is None else group_size
    bounds = _group_bounds(weights, limit)
    ends = np.append(chain_start, num_nodes)
    groups = [
        _group(
            chains.call[order[chain_start[first:stop]]],
            counts[first:stop],
            slots.start_slot[first:stop],
            slots.node_slot[order[ends[first] : ends[stop]]],
            position_of_node[ends[first : stop + 1]],
            slots.num_slots,
        )
        for first, stop in pairwise(bounds)
    ]
    host = PackedChains(
        gather=GatherIndex.build(rows, tables.num_read),
        output=torch.from_numpy(output),
        output_reader=torch.from_numpy(reader),
        output_is_identity=len(rows) == len(output) and bool((output == np.arange(len(rows))).all()),
        starts_from_nothing=torch.from_numpy(nothing),
        groups=tuple(groups),
        export_slot=torch.from_numpy(slots.node_slot[exports]),
        num_initial=num_initial,
        num_slots=slots.num_slots,
        chunk_size=size,
    )
    return host.to(device)


def default_group_size(weight: int, num_rows: int, chunk_size: int) -> int:
    """Nodes and starting chains of a group.

    A tree that has hardly more of them than its rows would have without replay is one group: to split few long chains
    would leave the GPU idle. Others are split so that a layer's memory stays that of a layer without sharing, but into
    about eight groups, at most twice as many (chains are not cut), so that launches do not grow with the branches.
    """
    without_replay = -(-num_rows // chunk_size)
    if weight <= 1.25 * without_replay:
        return weight
    most = max(3 * without_replay // 4, 384, -(-weight // 8))
    groups = -(-weight // most)
    return min(most, -(-weight // groups) + 32)  # even groups, and some room, since chains are not cut


def _group_bounds(weights: IntArray, limit: int) -> list[int]:
    """Offsets of the fewest runs of consecutive chains of at most ``limit`` together; one chain may have more."""
    bounds, total = [0], 0
    for chain, weight in enumerate(weights.tolist()):
        if total and total + weight > limit:
            bounds.append(chain)
            total = 0
        total += weight
    return [*bounds, len(weights)]


def _group(
    rounds: IntArray, counts: IntArray, start_slot: IntArray, node_slot: IntArray, positions: IntArray, num_slots: int
) -> ChainGroup:
    """One group.

    Args:
        rounds, counts, start_slot: ``[Q]`` call, nodes and slot of each chain.
        node_slot: ``[M]``.
        positions: ``[Q + 1]`` offsets of the chains in all positions.
        num_slots: of the whole tree.
    """
    present, round_of = np.unique(rounds, return_inverse=True)  # a group need not have chains of every round
    first_node = np.cumsum(counts) - counts
    chain_of_node = np.repeat(np.arange(len(counts)), counts)
    by_round = np.lexsort((-counts, round_of))
    all_rounds = np.arange(len(present) + 1)
    slot_round = np.full(num_slots, -1, np.int64)
    started = start_slot >= 0
    slot_round[start_slot[started]] = round_of[started]
    slot_order = np.argsort(slot_round, kind="stable")
    readers = GatherIndex.build(start_slot[::-1], num_slots)
    return ChainGroup(
        positions=(int(positions[0]), int(positions[-1])),
        cu_seqlens=torch.from_numpy(positions - positions[0]),
        chunk_indices=torch.from_numpy(
            np.stack([chain_of_node, np.arange(len(node_slot)) - first_node[chain_of_node]], axis=1)
        ),
        first_node=torch.from_numpy(first_node),
        start_slot=torch.from_numpy(start_slot.astype(np.int32)),
        node_slot=torch.from_numpy(node_slot.astype(np.int32)),
        chains_by_round=torch.from_numpy(by_round.astype(np.int32)),
        round_ptr=tuple(np.searchsorted(round_of[by_round], all_rounds).tolist()),
        round_nodes=tuple(int(counts[round_of == index].sum()) for index in all_rounds[:-1]),
        round_longest=tuple(int(counts[round_of == index].max()) for index in all_rounds[:-1]),
        slots_by_round=torch.from_numpy(slot_order.astype(np.int32)),
        slot_round_ptr=tuple(np.searchsorted(slot_round[slot_order], all_rounds).tolist()),
        slot_ptr=readers.ptr,
        slot_chains=(len(start_slot) - 1 - readers.positions).int(),
    )


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
