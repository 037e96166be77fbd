"""Delta rules on trees: `pytest tests/ops/test_linear_attention.py`."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.rules import (
    INPUT_NAMES,
    RULES,
    path_tables,
    per_trajectory,
    rule_inputs,
    stock_output,
    tree_tables,
    with_grad,
)
from support.trees import BRANCH_DEPTHS, branching, random_trajectories, real_trajectories
from torch.utils.checkpoint import checkpoint

from harts_hf.batch import LinearTables
from harts_hf.planner.chunks import build_chunk_tree
from harts_hf.tree import RolloutTree

both_rules = pytest.mark.parametrize("rule", RULES)


def upstreams(tree: RolloutTree, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """A gradient of the output of each trajectory."""
    generator = torch.Generator().manual_seed(1)
    shape = inputs[2].shape[1:]
    return [torch.randn(int(length), *shape, generator=generator).double() for length in tree.trajectory_lengths]


def summed(tree: RolloutTree, parts: list[torch.Tensor]) -> torch.Tensor:
    """Gradients of the trajectories added up on the rows of the tree."""
    total = parts[0].new_zeros(tree.num_tokens, *parts[0].shape[1:])
    for index, part in enumerate(parts):
        total[torch.from_numpy(tree.path(index))] += part
    return total


def assert_equals_transformers(rule: str, tree: RolloutTree, inputs: list[torch.Tensor]) -> None:
    """Outputs and gradients of a float64 call against one trajectory at a time."""
    parts = upstreams(tree, inputs)
    expected, expected_grads = per_trajectory(rule, tree, inputs, parts, wide=True)
    leaves = with_grad(inputs)
    output = RULES[rule](*leaves, tree_tables(tree)).output
    output.backward(summed(tree, parts))
    for index, alone in enumerate(expected):
        torch.testing.assert_close(output[torch.from_numpy(tree.path(index))], alone, rtol=1e-12, atol=1e-12)
    for name, leaf, grad in zip(INPUT_NAMES, leaves, expected_grads, strict=True):
        scale = grad.abs().max().item()
        torch.testing.assert_close(
            leaf.grad, grad, rtol=1e-12, atol=1e-12 * max(1, scale), msg=lambda text, name=name: f"{name}: {text}"
        )


@both_rules
@pytest.mark.parametrize("depth", BRANCH_DEPTHS)
def test_equals_transformers_at_branches(rule, depth):
    """A branch at each depth, interior ends, duplicates and a second root: fp64 within 1e-12, all gradients."""
    tree = RolloutTree.from_trajectories(branching(depth, vocab=50))
    assert_equals_transformers(rule, tree, rule_inputs(rule, tree.num_tokens))


@both_rules
@pytest.mark.parametrize("decay", [0.05, 5.0, 40.0])
def test_equals_transformers_on_random_trees(rule, decay):
    """Random ragged trees with weak and strong decays, grouped values and K != V where the rule has them."""
    tree = RolloutTree.from_trajectories(random_trajectories(3, vocab=40, count=8, max_piece=90))
    value_heads = 6 if rule == "gated" else 2
    inputs = rule_inputs(rule, tree.num_tokens, value_heads=value_heads, dim_k=12, dim_v=20, decay=decay)
    assert_equals_transformers(rule, tree, inputs)


@both_rules
@pytest.mark.parametrize("name", ["miniswe_b_drop", "vmcts_dafny_bst", "tot_game24"])
def test_equals_transformers_on_real_trees(rule, name):
    """Parts of real rollouts, where most branches lie inside chunks."""
    trajectories = real_trajectories(name, group=0, vocab=1000, max_tokens=300)[::7][:12]
    tree = RolloutTree.from_trajectories(trajectories)
    assert_equals_transformers(
        rule, tree, rule_inputs(rule, tree.num_tokens, heads=1, value_heads=1, dim_k=8, dim_v=8)
    )


def test_replaced_tables_gather_their_own_rows():
    """What has been made of some tables does not stay with others that are made of them."""
    tables = tree_tables(RolloutTree.from_trajectories([[1, 2, 3], [1, 4]]), 2)
    assert tables.gather.index.max() == 3 and (tables.output.index >= 0).all()
    others = replace(tables, slot_rows=np.full_like(tables.slot_rows, -1), row_slots=tables.row_slots[:1])
    assert (others.gather.index == -1).all() and len(others.output.index) == 1


@both_rules
@pytest.mark.parametrize("chunk_size", [1, 3, 8, 24, 64])
@pytest.mark.parametrize("use_qk_l2norm", [False, True])
def test_equals_the_recurrence(rule, chunk_size, use_qk_l2norm):
    """Chunkwise equals token by token, for any chunk size, with boundary states, exports and a given scale."""
    tree = RolloutTree.from_trajectories(random_trajectories(1, vocab=9, count=6, max_piece=20))
    tables = tree_tables(tree, chunk_size)
    first_rows = tables.gather.index.view(-1, chunk_size)[:, 0]  # copies of a row start from one state
    initial = torch.where(tables.parent < 0, (first_rows > 0).long(), -1)
    tables = replace(tables, initial=initial)
    inputs = rule_inputs(rule, tree.num_tokens, value_heads=2, dim_k=5, dim_v=3)
    if not use_qk_l2norm:  # the rule itself diverges for keys much longer than 1
        inputs[1] = inputs[1] / inputs[1].norm(dim=-1, keepdim=True)
    initial = torch.randn(2, 2, 5, 3, dtype=torch.float64)
    export = torch.arange(tables.num_nodes)[::3].flip(0)
    results = []
    for backend in ("torch", "reference"):
        leaves = with_grad([*inputs, initial])
        output, states = RULES[rule](
            *leaves[:5],
            tables,
            initial_states=leaves[5],
            export_nodes=export,
            scale=0.7,
            use_qk_l2norm=use_qk_l2norm,
            backend=backend,
        )
        generator = torch.Generator().manual_seed(0)
        for result in (output, states):
            weights = torch.randn(result.shape, generator=generator, dtype=torch.float64)
            (result * weights).sum().backward(retain_graph=True)
        results.append([output, states, *(leaf.grad for leaf in leaves)])
    names = ("output", "states", *INPUT_NAMES, "initial_states")
    for name, mine, expected in zip(names, *results, strict=True):
        scale = max(1.0, expected.abs().max().item())
        torch.testing.assert_close(
            mine, expected, rtol=1e-12, atol=1e-12 * scale, msg=lambda text, name=name: f"{name}: {text}"
        )


def bitwise_tree() -> RolloutTree:
    """Branches at 1, 2, 3, 63, 64, 65, 127 along one trunk, branches of branches, interior ends, a duplicate."""
    rng = np.random.default_rng(0)
    trunk = rng.integers(2, 50, 200)
    rows = [trunk, trunk[:70], trunk[:128], trunk.copy()]
    for child, (depth, size) in enumerate(zip(BRANCH_DEPTHS, (5, 70, 200, 10, 1, 130, 20), strict=True)):
        rows.append(np.concatenate([trunk[:depth], [50 + child], rng.integers(2, 50, size)]))
    for depth in (40, 66, 100):
        rows.append(np.concatenate([rows[6][:depth], [90], rng.integers(2, 50, 40)]))
    return RolloutTree.from_trajectories(rows)


@pytest.mark.essential(
    "(2, 2, 16, 16)-dtype0-gated",
    "(2, 2, 16, 16)-dtype1-kimi",
    "(1, 3, 8, 20)-dtype2-gated",
    "(1, 1, 5, 3)-dtype0-kimi",
)
@both_rules
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dims", [(2, 2, 16, 16), (1, 1, 5, 3), (1, 3, 8, 20)], ids=str)
def test_a_tree_equals_each_trajectory_alone_bit_for_bit(rule, dtype, dims):
    """Outputs and end states, and input gradients for one trajectory's upstream gradient at a time: torch.equal."""
    heads, value_heads, dim_k, dim_v = dims
    value_heads = value_heads if rule == "gated" else heads
    tree = bitwise_tree()
    tables = tree_tables(tree)
    inputs = rule_inputs(
        rule,
        tree.num_tokens,
        heads=heads,
        value_heads=value_heads,
        dim_k=dim_k,
        dim_v=dim_v,
        decay=0.05,  # weak: a chunk's first rows still weigh at its end
        dtype=dtype,
    )
    last_nodes = node_of_rows(tables)[torch.from_numpy(tree.end_rows.copy())]
    whole = with_grad(inputs)
    output, states = RULES[rule](*whole, tables, export_nodes=last_nodes)
    for index in range(tree.num_trajectories):
        path = torch.from_numpy(tree.path(index))
        alone = with_grad([value[path] for value in inputs])
        tables_alone = path_tables(len(path))
        alone_output, alone_states = RULES[rule](
            *alone, tables_alone, export_nodes=torch.tensor([tables_alone.num_nodes - 1])
        )
        assert torch.equal(output[path], alone_output)
        ends_its_node = tables.lengths[last_nodes[index]] == tables_alone.lengths[-1]
        upstream, upstream_states = torch.randn_like(output), torch.zeros_like(states)
        off_path = torch.ones(tree.num_tokens, dtype=torch.bool)
        off_path[path] = False
        upstream[off_path] = 0
        if ends_its_node:  # otherwise the trajectory ends inside another's chunk, which leaves another state
            assert torch.equal(states[index], alone_states[0])
            upstream_states[index] = torch.randn_like(states[index])
        grads = torch.autograd.grad((output, states), whole, (upstream, upstream_states), retain_graph=True)
        grads_alone = torch.autograd.grad(
            (alone_output, alone_states), alone, (upstream[path], upstream_states[index : index + 1])
        )
        for name, grad, expected in zip(INPUT_NAMES, grads, grads_alone, strict=True):
            assert torch.equal(grad[path], expected), f"trajectory {index}: {name}"
            assert not grad[off_path].any(), f"trajectory {index}: {name} beside the path"


def node_of_rows(tables: LinearTables) -> torch.Tensor:
    """``[N]`` the last chunk node of the path to each row, as far as a node ends there; else the row's owner."""
    return tables.output.index // tables.chunk_size


LOSS_SPANS = {
    "all": [(0, 300)],
    "before the branch": [(0, 66)],
    "before the branch and in later chunks": [(60, 66), (130, 300)],
    "one row and the end state": [(65, 66)],
}


@both_rules
@pytest.mark.parametrize("spans", LOSS_SPANS)
def test_gradients_enter_through_one_copy(rule, spans):
    """Whatever rows a trajectory's loss covers, it has the gradients that it has alone, bit for bit."""
    rng = np.random.default_rng(0)
    trunk = rng.integers(2, 50, 66)
    tree = RolloutTree.from_trajectories(
        [np.concatenate([trunk, [first], rng.integers(2, 50, 90 + first)]) for first in (50, 51, 52)]
    )
    # Decays so weak that the rows before the branch still weigh in the end state.
    tables, inputs = tree_tables(tree), rule_inputs(rule, tree.num_tokens, decay=0.01, dtype=torch.float32)
    whole, last_nodes = with_grad(inputs), node_of_rows(tables)[torch.from_numpy(tree.end_rows.copy())]
    output, states = RULES[rule](*whole, tables, export_nodes=last_nodes)
    for index in range(tree.num_trajectories):
        path = torch.from_numpy(tree.path(index))
        alone, tables_alone = with_grad([value[path] for value in inputs]), path_tables(len(path))
        upstream, upstream_states = torch.zeros_like(output), torch.zeros_like(states)
        for start, stop in LOSS_SPANS[spans]:
            upstream[path[start:stop]] = torch.randn_like(output[path[start:stop]])
        if spans == "one row and the end state":
            upstream_states[index] = torch.randn_like(states[index])
        grads = torch.autograd.grad((output, states), whole, (upstream, upstream_states), retain_graph=True)
        results = RULES[rule](*alone, tables_alone, export_nodes=torch.tensor([tables_alone.num_nodes - 1]))
        expected = torch.autograd.grad(tuple(results), alone, (upstream[path], upstream_states[index : index + 1]))
        for name, grad, wanted in zip(INPUT_NAMES, grads, expected, strict=True):
            assert torch.equal(grad[path], wanted), f"trajectory {index}: {name}"


@both_rules
@pytest.mark.parametrize("decay", [5.0, *(pytest.param(one, marks=pytest.mark.exhaustive) for one in (1.0, 40.0))])
def test_float32_error_is_within_the_fallbacks(rule, decay):
    """RMS errors against fp64 are at most those of Transformers' fp32 fallback, output and every gradient.

    Measured over 8 trees and decays: 0.03 to 0.46 of the fallback's, the smaller the stronger the decay, because
    exponents are summed between two slots and not subtracted (gate gradients at decay 40: below 0.01).
    """
    tree = RolloutTree.from_trajectories(random_trajectories(0, vocab=50, count=6, max_piece=100))
    inputs = rule_inputs(rule, tree.num_tokens, dim_k=32, dim_v=24, decay=decay, dtype=torch.float32)
    exact_inputs = [value.double() for value in inputs]
    parts = upstreams(tree, inputs)
    exact, exact_grads = per_trajectory(rule, tree, exact_inputs, parts, wide=True)
    stock, stock_grads = per_trajectory(rule, tree, inputs, parts, wide=False)
    leaves = with_grad(inputs)
    output = RULES[rule](*leaves, tree_tables(tree)).output
    output.backward(summed(tree, parts).float())
    ours = torch.cat([output[torch.from_numpy(tree.path(index))] for index in range(tree.num_trajectories)])
    pairs = [("output", ours, torch.cat(stock), torch.cat(exact))]
    pairs += zip(INPUT_NAMES, [leaf.grad for leaf in leaves], stock_grads, exact_grads, strict=True)
    for name, mine, fallback, reference in pairs:
        own_error = (mine.double() - reference).square().mean().sqrt()
        allowed = (fallback.double() - reference).square().mean().sqrt()
        assert own_error <= 0.8 * allowed, f"{name}: {own_error:.2e} against {allowed:.2e}"


@both_rules
@pytest.mark.parametrize("step", [-5.0, -20.0, -100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strong_decays_stay_finite(rule, step, dtype):
    """g of -5 (to -320 over a chunk), -20 or -100 at every step: finite outputs and gradients."""
    tree = RolloutTree.from_trajectories(branching(127, vocab=50))
    inputs = rule_inputs(rule, tree.num_tokens, dtype=dtype)
    inputs[3] = torch.full_like(inputs[3], step)
    leaves = with_grad(inputs)
    output = RULES[rule](*leaves, tree_tables(tree)).output
    output.sum().backward()
    assert output.isfinite().all() and output.dtype == dtype
    for name, leaf in zip(INPUT_NAMES, leaves, strict=True):
        assert leaf.grad.isfinite().all() and leaf.grad.dtype == dtype, name


@both_rules
@pytest.mark.parametrize("decay", [0.1, 20.0])
def test_the_first_gate_has_no_gradient(rule, decay):
    """The gate of a first token decays a state of zeros: its gradient is exactly 0, also summed over trajectories."""
    tree = RolloutTree.from_trajectories(branching(2, vocab=50) + random_trajectories(0, vocab=50))
    leaves = with_grad(rule_inputs(rule, tree.num_tokens, decay=decay, dtype=torch.float32))
    output = RULES[rule](*leaves, tree_tables(tree)).output
    output.backward(torch.randn_like(output))
    first = torch.from_numpy(tree.depth == 0)
    assert not leaves[3].grad[first].any()
    assert leaves[3].grad[~first].any()


@both_rules
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cut_with_the_state_handed_over_equals_the_whole(rule, dtype):
    """Cut at a chunk boundary and carried on from the exported state: outputs and gradients bit for bit."""
    length, cut = 200, 128
    inputs = rule_inputs(rule, length, decay=0.05, dtype=dtype)
    whole, split = with_grad(inputs), with_grad(inputs)
    expected = RULES[rule](*whole, path_tables(length)).output
    head = RULES[rule](*(leaf[:cut] for leaf in split), path_tables(cut), export_nodes=torch.tensor([1]))
    tail = RULES[rule](
        *(leaf[cut:] for leaf in split), path_tables(length - cut, first_depth=cut), initial_states=head.states
    )
    assert head.states.dtype == torch.float32
    output = torch.cat([head.output, tail.output])
    assert torch.equal(output, expected)
    upstream = torch.randn_like(output)
    expected.backward(upstream)
    output.backward(upstream)
    for name, one, two in zip(INPUT_NAMES, whole, split, strict=True):
        assert torch.equal(one.grad, two.grad), name


@both_rules
def test_handed_rows_are_replayed_before_own_rows(rule):
    """Rows of a trunk since its last chunk boundary stand first: own outputs and all gradients as in the whole."""
    tree = RolloutTree.from_trajectories(branching(80, vocab=50)[:2])
    first, handed = 64, 16  # the trunk is cut at row 80; its last boundary is 64
    inputs = rule_inputs(rule, tree.num_tokens)
    whole, part = with_grad(inputs), with_grad([value[first:] for value in inputs])
    tables = tree_tables(tree)
    expected, states = RULES[rule](*whole, tables, export_nodes=torch.tensor([0]))
    parent = np.where(tree.parent[first:] >= first, tree.parent[first:] - first, -1)
    own = np.arange(handed, tree.num_tokens - first)
    tables_part = LinearTables.build(build_chunk_tree(parent, tree.depth[first:]), own)
    start = states.detach().clone().requires_grad_()
    output = RULES[rule](*part, tables_part, initial_states=start).output
    assert torch.equal(output, expected[first + handed :])
    upstream = torch.randn_like(output)
    output.backward(upstream)
    full = torch.cat([torch.zeros(first + handed, *upstream.shape[1:], dtype=upstream.dtype), upstream])
    torch.autograd.backward((expected, states), (full, torch.zeros_like(states)))
    for name, one, two in zip(INPUT_NAMES, whole, part, strict=True):
        torch.testing.assert_close(
            one.grad[first:], two.grad, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert start.grad.any()


@both_rules
def test_checkpointing_and_a_second_run_change_nothing(rule):
    """Non-reentrant checkpointing, and simply running again, gives bitwise the same."""
    tree = bitwise_tree()
    tables = tree_tables(tree)
    results = []
    for checkpointed in (False, True, False):
        leaves = with_grad(rule_inputs(rule, tree.num_tokens, dtype=torch.float32))

        def run(*leaves):
            return RULES[rule](*leaves, tables, export_nodes=torch.tensor([2]))

        output, states = checkpoint(run, *leaves, use_reentrant=False) if checkpointed else run(*leaves)
        (output.square().sum() + states.square().sum()).backward()
        results.append([output, states, *(leaf.grad for leaf in leaves)])
    for once, *others in zip(*results, strict=True):
        assert all(torch.equal(once, other) for other in others)


@both_rules
def test_unwritten_memory_is_never_read(rule):
    """With fresh memory full of NaN everything stays finite, gradients of unused inputs included."""
    tree = RolloutTree.from_trajectories(random_trajectories(2, vocab=50))
    leaves = with_grad(rule_inputs(rule, tree.num_tokens, dtype=torch.float32))
    torch.use_deterministic_algorithms(True)  # also fills new memory with NaN
    try:
        output, states = RULES[rule](*leaves, tree_tables(tree), export_nodes=torch.tensor([0]))
        states.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert output.isfinite().all() and states.isfinite().all()
    for name, leaf in zip(INPUT_NAMES, leaves, strict=True):
        assert leaf.grad.isfinite().all(), name


@both_rules
def test_autocast_does_not_round_the_rule(rule):
    """Inside a bf16 autocast region the rule and its backward are computed in fp32 all the same."""
    results = []
    for enabled in (False, True):
        leaves = with_grad(rule_inputs(rule, 70, dtype=torch.float32))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            output = RULES[rule](*leaves, path_tables(70)).output
            output.backward(torch.ones_like(output))
        results.append([output, *(leaf.grad for leaf in leaves)])
    for exact, cast in zip(*results, strict=True):
        assert torch.equal(exact, cast)


def test_agrees_with_transformers_in_bfloat16():
    """bf16 inputs: the same fp32 computation, rounded at the end to within one step of the fallback."""
    for rule in RULES:
        inputs = rule_inputs(rule, 150, dtype=torch.bfloat16)
        mine = RULES[rule](*inputs, path_tables(150)).output
        stock = stock_output(rule, inputs, wide=False)
        assert mine.dtype == stock.dtype == torch.bfloat16
        torch.testing.assert_close(mine, stock, rtol=2**-8, atol=1e-6)


@both_rules
def test_bad_input_is_named(rule):
    """Shapes, dtypes, states and backends are checked."""
    q, k, v, g, beta = rule_inputs(rule, 70)
    run, tables = RULES[rule], path_tables(70)
    with pytest.raises(ValueError, match=r"expected q of shape \[70, H, K\]"):
        run(q[:69], k[:69], v[:69], g[:69], beta[:69], tables)
    with pytest.raises(ValueError, match="expected k of shape"):
        run(q, k[:, :1], v, g, beta, tables)
    with pytest.raises(ValueError, match="expected g of shape"):
        run(q, k, v, g[:, :1], beta, tables)
    with pytest.raises(ValueError, match="expected beta of shape"):
        run(q, k, v, g, beta[:, :1], tables)
    with pytest.raises(ValueError, match="value heads"):
        three = [x.repeat(1, 2, *[1] * (x.dim() - 2))[:, :3] for x in (v, g, beta)]
        run(q, k, three[0], three[1] if rule == "gated" else g, three[2], tables)
    with pytest.raises(ValueError, match=r"float32 or wider, got torch.bfloat16"):
        run(q, k, v, g, beta, tables, initial_states=torch.zeros(1, 2, 16, 16, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="expected initial_states for 1 boundary states, got 0"):
        run(q, k, v, g, beta, path_tables(70, first_depth=64))
    with pytest.raises(ValueError, match=r"one of \[.*'reference', 'torch'.*got 'numpy'"):
        run(q, k, v, g, beta, tables, backend="numpy")
