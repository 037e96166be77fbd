"""The fewest sequential linear calls against exhaustive search, and on real rollouts."""

from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared_data import SHAPE_NAMES, shape_trees

from harts_hf.planner import build_chunk_tree, decompose_chains, min_linear_calls
from harts_hf.tree import RolloutTree

# C = 64, the largest over the groups: the column of examples/shapes/README.md.
CALLS = {
    "tau_airline_a": 2,
    "tau_airline_b": 2,
    "anyswe_a": 3,
    "anyswe_b": 3,
    "nemo_qwen3think_b_drop": 2,
    "miniswe_b_drop": 2,
    "miniswe_b_keep": 1,
    "tot_game24": 4,
    "lats_webshop": 3,
    "vmcts_dafny_bst": 4,
}


@cache
def forests(num_nodes):
    """Every forest of ``num_nodes`` nodes up to isomorphism, as parents in preorder."""

    def trees(size):
        return [(children,) for children in bags(size - 1, size - 1)]

    def bags(total, largest):
        """Multisets of trees of ``total`` nodes, trees in descending order of size then index."""
        if total == 0:
            return [()]
        found = []
        for size in range(min(total, largest), 0, -1):
            for tree in trees(size):
                found += [(tree, *rest) for rest in bags(total - size, size)]
        return list({canonical(bag): bag for bag in found}.values())

    def canonical(bag):
        return tuple(sorted(canonical(tree[0]) for tree in bag))

    def flatten(bag, above, parents):
        for tree in bag:
            parents.append(above)
            flatten(tree[0], len(parents) - 1, parents)
        return parents

    return [tuple(flatten(bag, -1, [])) for bag in bags(num_nodes, num_nodes)]


def fewest_calls_by_search(parent, taps):
    """Breadth-first over what has been run: each call runs any set of disjoint chains that may start."""
    num_nodes = len(parent)
    children = [[c for c in range(num_nodes) if parent[c] == v] for v in range(num_nodes)]

    @cache
    def chains_from(node):
        """Every downward chain that starts at ``node``, as (nodes run, nodes whose state is left), bit sets."""
        found = [(1 << node, 1 << node)]
        for child in children[node]:
            for run, left in chains_from(child):
                found.append((run | 1 << node, left | 1 << node if taps == "anywhere" else left))
        return found

    everything = (1 << num_nodes) - 1
    seen = front = {(0, 0)}
    calls = 0
    while not any(done == everything for done, _ in front):
        calls += 1
        reached = set()
        for done, states in front:
            ready = [v for v in range(num_nodes) if not done >> v & 1 and (parent[v] < 0 or states >> parent[v] & 1)]
            # Starting every chain that may start is never worse: a chain delayed can only delay what hangs below it.
            for chosen in product(*(chains_from(v) for v in ready)):
                run, left = 0, 0
                for more_run, more_left in chosen:
                    run, left = run | more_run, left | more_left
                reached.add((done | run, states | left))
        front = reached - seen
        seen = seen | reached
    return calls


@pytest.mark.parametrize("taps", ["anywhere", "ends"])
@pytest.mark.parametrize("num_nodes", range(1, 9))
def test_fewest_calls_equal_exhaustive_search(num_nodes, taps):
    """On every forest of up to 8 chunk nodes the number equals the search's, and the chains attain it."""
    counts = [1, 2, 4, 9, 20, 48, 115, 286]  # forests of n nodes: rooted trees of n + 1 nodes (OEIS A000081)
    assert len(forests(num_nodes)) == counts[num_nodes - 1]
    for parent in forests(num_nodes):
        chains = decompose_chains(np.array(parent), taps=taps)
        assert chains.num_calls == fewest_calls_by_search(parent, taps), parent
        check_chains(parent, chains, taps)


def check_chains(parent, chains, taps):
    """Chains are downward paths of one call each that start where an earlier call left a state."""
    assert chains.call.min() == 0 and chains.call.max() == chains.num_calls - 1
    goes_on = [0] * len(parent)
    starts_below = [0] * len(parent)
    for node, above in enumerate(parent):
        if chains.head[node] == node:
            if above >= 0:
                assert chains.call[above] < chains.call[node]
                starts_below[above] += 1
        else:
            assert above >= 0 and chains.head[node] == chains.head[above] and chains.call[node] == chains.call[above]
            goes_on[above] += 1
    assert max(goes_on) <= 1
    if taps == "ends":
        assert not any(on and below for on, below in zip(goes_on, starts_below, strict=True))


@st.composite
def parents(draw):
    """Random forests of up to 60 nodes."""
    return [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(1, 60)))]


@given(parents(), st.sampled_from(["anywhere", "ends"]))
def test_chains_attain_the_ranks(parent, taps):
    """On random forests the chains are legal and the ranks are those of the definition."""
    chains = decompose_chains(np.array(parent), taps=taps)
    check_chains(parent, chains, taps)

    def rank(node):
        below = sorted((rank(c) for c in range(len(parent)) if parent[c] == node), reverse=True)
        if len(below) < 2:
            return below[0] if below else 1
        return max(below[0], below[1] + 1) if taps == "anywhere" else below[0] + 1

    assert chains.num_calls == max(rank(v) for v in range(len(parent)) if parent[v] < 0)


def test_second_model_counts_branching_nodes():
    """With states at chain ends only, the number is the most branching chunk nodes on a path, plus one."""
    for name in ("miniswe_b_drop", "tot_game24", "lats_webshop"):
        for tree in shape_trees(name):
            parent = build_chunk_tree(tree.parent, tree.depth).parent
            branching = np.bincount(parent[parent >= 0], minlength=len(parent)) > 1
            above = np.zeros(len(parent), np.int64)
            for node in range(len(parent)):
                above[node] = branching[node] + (above[parent[node]] if parent[node] >= 0 else 0)
            assert min_linear_calls(tree, taps="ends") == above.max() + 1


@pytest.mark.parametrize("name", SHAPE_NAMES)
def test_calls_of_real_rollouts(name):
    """The column ``calls`` of the data's table is reproduced."""
    assert max(min_linear_calls(tree) for tree in shape_trees(name)) == CALLS[name]


def test_calls_of_miniswe_if_states_are_left_at_ends_only():
    """92 calls instead of 2."""
    assert max(min_linear_calls(tree, taps="ends") for tree in shape_trees("miniswe_b_drop")) == 92


def test_several_roots_take_the_largest_rank():
    """No virtual root: two single chunks side by side are one call, a root without tokens likewise."""
    assert min_linear_calls(RolloutTree.from_shape([-1, -1], [10, 20], [0, 1])) == 1
    assert min_linear_calls(RolloutTree.from_shape([-1, 0, 0], [0, 10, 20], [1, 2])) == 1


def test_branch_inside_the_first_chunk_needs_one_call():
    """Children that replay a shared start inside one chunk have chunk nodes of their own, side by side."""
    inside = RolloutTree.from_shape([-1, 0, 0], [63, 300, 300], [1, 2])
    on_boundary = RolloutTree.from_shape([-1, 0, 0], [64, 300, 300], [1, 2])
    assert min_linear_calls(inside) == 1
    assert min_linear_calls(on_boundary) == 2


def test_unknown_taps():
    """Another model of taps lists the known ones."""
    with pytest.raises(ValueError, match="anywhere, ends, got 'middle'"):
        min_linear_calls(RolloutTree.from_trajectories([[1]]), taps="middle")
