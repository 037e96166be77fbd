"""The state kernels, under Triton's interpreter, against autograd of the recurrence written out."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.hopper import compile_for_hopper

pytest.importorskip("triton")

from harts_hf.batch import LinearTables
from harts_hf.kernels.linear_attention.fla_tables import (
    ChainGroup,
    PackedChains,
    build_packed_chains,
    default_group_size,
    packed_chains,
)
from harts_hf.kernels.linear_attention.triton_states import choose_block_v, run_states_backward, run_states_forward
from harts_hf.planner.chunks import ChunkTree, build_chunk_tree
from harts_hf.planner.linear_calls import decompose_chains
from harts_hf.tree import RolloutTree

CHUNK = 16  # tl.dot wants 16 at least


def ragged_tree(seed: int, num: int = 9, longest: int = 90) -> RolloutTree:
    """Trajectories that share prefixes of all lengths, some ending inside others."""
    rng = np.random.default_rng(seed)
    trajectories = [rng.integers(0, 50, 40)]
    for _ in range(num):
        base = trajectories[rng.integers(len(trajectories))]
        cut = rng.integers(0, len(base) + 1)
        tail = rng.integers(0, 50, rng.integers(1, longest - 30))
        trajectories.append(np.concatenate([base[:cut], tail])[:longest])
    trajectories.append(trajectories[0][:17])
    return RolloutTree.from_trajectories(trajectories)


def tables_of(tree: RolloutTree) -> LinearTables:
    chunks = build_chunk_tree(tree.parent, tree.depth, CHUNK)
    return LinearTables.build(chunks, np.arange(tree.num_tokens))


def inputs(packed: PackedChains, kda: bool, heads: int = 1, value_heads: int = 2, dim_k: int = 16, dim_v: int = 32):
    positions = packed.num_positions
    generator = torch.Generator().manual_seed(positions)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    k_heads = value_heads if kda else heads
    q, k = rand(1, positions, k_heads, dim_k), rand(1, positions, k_heads, dim_k) * 0.3
    w, u = rand(1, positions, value_heads, dim_k) * 0.3, rand(1, positions, value_heads, dim_v)
    gate = rand(1, positions, value_heads, dim_k) if kda else rand(1, positions, value_heads)
    gate = -torch.nn.functional.softplus(gate) * 0.3
    g = torch.empty_like(gate)
    for begin, end in node_rows(packed):
        g[:, begin:end] = gate[:, begin:end].cumsum(1)
    return q, k, w, u, g


def node_rows(packed: PackedChains) -> list[tuple[int, int]]:
    rows = []
    for group in packed.groups:
        for chain, step in group.chunk_indices.tolist():
            begin = int(group.cu_seqlens[chain]) + step * packed.chunk_size
            end = min(begin + packed.chunk_size, int(group.cu_seqlens[chain + 1]))
            rows.append((group.positions[0] + begin, group.positions[0] + end))
    return rows


def nodes_of_chains(packed: PackedChains) -> list[tuple[int, range]]:
    """Start slot and nodes, numbered over all groups, of each chain in an order that honours the chains' starts."""
    found, before = [], 0
    for group in packed.groups:
        ends = [*group.first_node.tolist(), group.num_nodes]
        for chain in group.chains_by_round.tolist():
            found.append((int(group.start_slot[chain]), range(before + ends[chain], before + ends[chain + 1])))
        before += group.num_nodes
    return found


def by_hand(k, w, u, g, slots, packed: PackedChains):
    """h, v_new, slots and states after each node, one node at a time."""
    group = w.shape[2] // k.shape[2]
    slots = list(slots)
    node_slot = torch.cat([chains.node_slot for chains in packed.groups])
    h, v_new, after = ([None] * len(node_slot) for _ in range(3))
    rows = node_rows(packed)
    for start, nodes in nodes_of_chains(packed):
        state = slots[start] if start >= 0 else torch.zeros(w.shape[2], k.shape[3], u.shape[3], dtype=u.dtype)
        for node in nodes:
            begin, end = rows[node]
            k_n = k[0, begin:end].repeat_interleave(group, 1)
            g_n, w_n, u_n = g[0, begin:end], w[0, begin:end], u[0, begin:end]
            h[node] = state
            v_new[node] = u_n - torch.einsum("thk,hkv->thv", w_n, state)
            if g.dim() == 4:
                state = state * g_n[-1].exp2()[..., None] + torch.einsum("thk,thv->hkv", k_n, v_new[node])
            else:
                decayed = v_new[node] * (g_n[-1] - g_n).exp2()[..., None]
                state = state * g_n[-1].exp2()[:, None, None] + torch.einsum("thk,thv->hkv", k_n, decayed)
            after[node] = state
            if int(node_slot[node]) >= 0:
                slots[int(node_slot[node])] = state
    return torch.stack(h)[None], torch.cat(v_new)[None], slots, after


def run_forward(k, w, u, g, slots, packed: PackedChains, **options):
    """The kernel over all groups."""
    parts = []
    for group in packed.groups:
        cut = [x[:, slice(*group.positions)] for x in (k, w, u, g)]
        parts.append(run_states_forward(*cut, slots, group, chunk_size=packed.chunk_size, **options))
    return [torch.cat(column, 1) for column in zip(*parts, strict=True)]


def run_backward(q, k, w, g, do, dv, d_slots, packed: PackedChains, **options):
    """The kernel over all groups, last one first."""
    parts = []
    for group in reversed(packed.groups):
        cut = [x[:, slice(*group.positions)] for x in (q, k, w, g, do, dv)]
        parts.append(run_states_backward(*cut, d_slots, group, chunk_size=packed.chunk_size, **options))
    return [torch.cat(column[::-1], 1) for column in zip(*parts, strict=True)]


@pytest.mark.parametrize("group_size", [1, 7, 40, None])
def test_packed_chains_cover_every_row_once(group_size: int | None):
    """Every node's rows stand in order in its chain, owners and readers are inverse, groups are consecutive."""
    for seed in range(20):
        tables = tables_of(ragged_tree(seed))
        exports = np.array([0, tables.num_nodes - 1])
        packed = build_packed_chains(tables, exports, 0, group_size=group_size)
        assert packed.num_positions == int(tables.lengths.sum())
        assert (packed.output_reader[packed.output] == torch.arange(tables.num_rows)).all()
        assert (packed.gather.index[packed.output] == torch.arange(tables.num_rows)).all()
        assert [g.positions[0] for g in packed.groups] == [0, *(g.positions[1] for g in packed.groups[:-1])]
        assert packed.groups[-1].positions[1] == packed.num_positions
        assert sum(group.num_nodes for group in packed.groups) == tables.num_nodes
        for group in packed.groups:
            counts = torch.diff(group.cu_seqlens)
            nodes = torch.diff(torch.cat([group.first_node, torch.tensor([group.num_nodes])]))
            assert (nodes == -(-counts // CHUNK)).all()
            assert sorted(group.chains_by_round.tolist()) == list(range(group.num_chains))
            assert group.round_nodes == tuple(
                int(nodes[group.chains_by_round[begin:end]].sum()) for begin, end in pairwise(group.round_ptr)
            )
            weight = group.num_nodes + int((group.start_slot >= 0).sum())
            assert group_size is None or weight <= group_size or group.num_chains == 1


@given(st.lists(st.integers(-1, 59), min_size=1, max_size=60), st.sampled_from([1, 5, 20, 1000]))
def test_chains_start_from_the_right_state(parents: list[int], group_size: int):
    """A machine that only reads the tables gives every node the state of its parent, left in an earlier round."""
    parent = np.array([min(above, node - 1) for node, above in enumerate(parents)])
    tables = tables_of_nodes(parent)
    packed = build_packed_chains(tables, np.zeros(0, np.int64), 0, group_size=group_size)
    slots: dict[int, int] = {}
    seen = []
    for group in packed.groups:
        ends = [*group.first_node.tolist(), group.num_nodes]
        for begin, end in pairwise(group.round_ptr):
            written = {}
            for chain in group.chains_by_round[begin:end].tolist():
                start = int(group.start_slot[chain])
                state = -1 if start < 0 else slots[start]
                for position in range(ends[chain], ends[chain + 1]):
                    node = node_at(packed, group, position)
                    assert parent[node] == state
                    seen.append(node)
                    state = node
                    if int(group.node_slot[position]) >= 0:
                        written[int(group.node_slot[position])] = node
            assert not slots.keys() & written.keys()
            slots |= written
        for slot in range(packed.num_slots):
            readers = group.slot_chains[group.slot_ptr[slot] : group.slot_ptr[slot + 1]].tolist()
            assert readers == sorted((group.start_slot == slot).nonzero().squeeze(1).tolist(), reverse=True)
    assert sorted(seen) == list(range(len(parent)))
    assert packed.num_slots == len(slots)
    rounds = decompose_chains(parent).num_calls
    assert all(group.num_rounds <= rounds for group in packed.groups)


def tables_of_nodes(parent: np.ndarray) -> LinearTables:
    """Tables in which node ``m`` is the one row ``m``."""
    count = len(parent)
    rows = np.full((count, CHUNK), -1)
    rows[:, 0] = np.arange(count)
    nothing = np.full(count, -1)
    chunks = ChunkTree(
        chunk_size=CHUNK, rows=rows, lengths=np.ones(count, np.int64), parent=parent, entry_row=nothing,
        level=np.zeros(count, np.int64), owner=np.arange(count), owner_slot=np.zeros(count, np.int64),
    )  # fmt: skip
    return LinearTables.build(chunks, np.arange(count))


def node_at(packed: PackedChains, group: ChainGroup, position: int) -> int:
    """The tables' number of a group's node, which is that of its one row."""
    chain, step = group.chunk_indices[position].tolist()
    return int(packed.gather.index[group.positions[0] + int(group.cu_seqlens[chain]) + step])


def test_chunk_aligned_branches_pack_in_compact_order():
    """A tree whose branches lie at chunk boundaries needs no reordering: packing costs it nothing."""
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, 9, 2 * CHUNK)
    tails = [rng.integers(10 * i, 10 * i + 9, CHUNK * 3 - 5 * i) for i in range(4)]
    tree = RolloutTree.from_trajectories([np.concatenate([prefix, tail]) for tail in tails])
    packed = build_packed_chains(tables_of(tree), np.array([], np.int64), 0)
    assert packed.output_is_identity
    assert (packed.gather.index == torch.arange(tree.num_tokens)).all()
    assert len(packed.groups) == 1 and packed.groups[0].num_rounds == 2


def test_packed_form_is_built_once():
    """The packed form is kept per tables and per exported nodes."""
    tables = tables_of(ragged_tree(1))
    nodes = torch.tensor([1, 2])
    assert packed_chains(tables, nodes, 0) is packed_chains(tables, nodes, 0)
    assert packed_chains(tables, nodes[:0], 0) is not packed_chains(tables, nodes, 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kda", [False, True])
@pytest.mark.parametrize(("seed", "handed_in"), [(0, False), (3, True)])
def test_states_and_gradients(kda: bool, seed: int, handed_in: bool):
    """States, exports and every gradient equal autograd's in fp64; fp32 sums over at most 6 chunks: 2e-5 relative."""
    tables = tables_of(ragged_tree(seed))
    roots = (tables.parent < 0).nonzero().squeeze(1)
    if handed_in:  # the first root keeps starting from nothing, the others share one boundary state
        initial = tables.initial.clone()
        initial[roots[1:]] = 0
        tables = replace(tables, initial=initial)
    exports = np.array([0, tables.num_nodes // 2])
    packed = build_packed_chains(tables, exports, int(handed_in))
    in_groups = build_packed_chains(tables, exports, int(handed_in), group_size=6)
    assert len(packed.groups) == 1 and len(in_groups.groups) > 3
    q, k, w, u, g = inputs(packed, kda)
    scale = 0.25
    shape = (packed.num_slots, w.shape[2], k.shape[3], u.shape[3])
    slots = torch.full(shape, float("nan"))
    slots[: packed.num_initial] = torch.randn(packed.num_initial, *shape[1:])
    h, v_new = run_forward(k, w, u, g, slots, packed, write_slots=True)
    u_ref = u.double().requires_grad_()
    start = slots.double().requires_grad_()
    h_ref, v_ref, slots_ref, after = by_hand(k.double(), w.double(), u_ref, g.double(), start, packed)
    close(h, h_ref)
    close(v_new, v_ref)
    close(slots, torch.stack(slots_ref))
    for width in (None, 16):
        again = run_forward(k, w, u, g, slots, packed, write_slots=False, block_v=width)
        assert torch.equal(again[0], h) and torch.equal(again[1], v_new)
    slots_in_groups = torch.full(shape, float("nan"))
    slots_in_groups[: packed.num_initial] = slots[: packed.num_initial]
    again = run_forward(k, w, u, g, slots_in_groups, in_groups, write_slots=True)
    assert torch.equal(again[0], h) and torch.equal(again[1], v_new) and torch.equal(slots_in_groups, slots)

    do, dv = torch.randn_like(u), torch.randn_like(u)
    d_slots = torch.zeros(shape)
    d_slots[packed.export_slot] = torch.randn(len(packed.export_slot), *shape[1:])
    d_exports = d_slots.clone()
    dh, dv_new = run_backward(q, k, w, g, do, dv, d_slots, packed, scale=scale)
    d_slots_in_groups = d_exports.clone()
    again = run_backward(q, k, w, g, do, dv, d_slots_in_groups, in_groups, scale=scale)
    assert torch.equal(again[0], dh) and torch.equal(again[1], dv_new) and torch.equal(d_slots_in_groups, d_slots)

    group = w.shape[2] // q.shape[2]
    decayed_q = q.double().repeat_interleave(group, 2) * (1.0 if kda else g.double().exp2()[..., None])
    loss = (v_ref * dv).sum()
    loss = loss + sum((slots_ref[slot] * d_exports[slot]).sum() for slot in packed.export_slot.tolist())
    for node, (begin, end) in enumerate(node_rows(packed)):
        out = torch.einsum("thk,hkv->thv", decayed_q[0, begin:end], h_ref[0, node])
        loss = loss + scale * (out * do[0, begin:end]).sum()
    du, d_start, *d_after = torch.autograd.grad(loss, [u_ref, start, *after], allow_unused=True)
    close(dv_new, du)
    if handed_in:
        close(d_slots[: packed.num_initial], d_start[: packed.num_initial])
    for node, gradient in enumerate(d_after):
        close(dh[0, node], torch.zeros_like(after[node]) if gradient is None else gradient)


def test_block_width_fills_the_chip_without_a_straggler():
    """One long chain takes narrow blocks, more so with few heads; many short chains take wide ones."""
    assert choose_block_v(512, 512, 32, 128, backward=False) == 32
    assert choose_block_v(512, 512, 16, 128, backward=False) == 16
    assert choose_block_v(1024, 256, 32, 128, backward=False) == 64
    assert choose_block_v(1024, 256, 32, 128, backward=True) == 32
    assert choose_block_v(9, 3, 30, 192, backward=False) == 64
    with pytest.raises(ValueError, match="multiple of 16, got 100"):
        choose_block_v(1, 1, 1, 100, backward=False)


def test_only_trees_with_much_replay_are_split():
    """One group up to a quarter more nodes than rows fill, else even ones of three quarters of those, or eight."""
    assert default_group_size(1280, 65536, 64) == 1280
    assert default_group_size(1281, 65536, 64) == 641 + 32
    assert default_group_size(1535, 65536, 64) == 768
    assert default_group_size(384, 64, 64) == 384
    assert default_group_size(10**6, 64, 64) == 125_000


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 2e-5) -> None:
    error = (got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-12)
    assert error < tolerance, error


@pytest.mark.exhaustive
def test_any_round_compiles_once():
    """Rounds whose chains begin at any position are launched, for Hopper, with one kernel per width of columns."""
    printed = compile_for_hopper(
        """
from ops.test_linear_attention_triton import *

launched = compile_launches()
for seed in range(8):
    packed = packed_chains(tables_of(ragged_tree(seed)), torch.zeros(0, dtype=torch.int64), 0)
    q, k, w, u, g = inputs(packed, False)
    q, k, w, u = (x.bfloat16() for x in (q, k, w, u))
    slots = torch.zeros(packed.num_slots, 2, 16, 32)
    for group in packed.groups:
        options = dict(chunk_size=CHUNK, block_v=16)
        run_states_forward(k, w, u, g, slots, group, write_slots=True, **options)
        run_states_backward(q, k, w, g, u, u, slots, group, scale=1.0, **options)
for kernel in sorted({name for name, _ in launched}):
    hashes = [key for name, key in launched if name == kernel]
    print(kernel, len(hashes) > 2, len(set(hashes)))
"""
    )
    wanted = ["states_backward True 1", "states_forward True 1", "sum_children True 1"]
    assert printed.splitlines() == wanted
