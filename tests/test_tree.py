"""RolloutTree against a brute-force trie: the sorted set of all prefixes is the preorder of its rows."""

import numpy as np
import pytest
from hypothesis import given
from shared_data import SHAPE_NAMES, shape_trees
from strategies import shapes, trajectories

from harts_hf.tree import RolloutTree
from harts_hf.tree.matching import matching_rows

# expanded, unique, ratio of examples/shapes/README.md
TABLE = {
    "tau_airline_a": (50, 200, 1_313_682, 740_189, 1.77, 13_958),
    "tau_airline_b": (50, 2_454, 13_898_843, 740_189, 18.78, 13_958),
    "anyswe_a": (4, 20, 177_610, 171_207, 1.04, 25_575),
    "anyswe_b": (4, 150, 1_080_136, 171_207, 6.31, 25_575),
    "nemo_qwen3think_b_drop": (5, 62, 425_022, 85_185, 4.99, 16_433),
    "miniswe_b_drop": (20, 815, 11_713_040, 589_671, 19.86, 66_011),
    "miniswe_b_keep": (20, 815, 15_883_656, 528_077, 30.08, 86_388),
    "tot_game24": (100, 8_412, 4_673_074, 206_808, 22.60, 648),
    "lats_webshop": (3, 70, 67_669, 4_520, 14.97, 1_459),
    "vmcts_dafny_bst": (10, 1_110, 784_387, 61_376, 12.78, 1_370),
}


def prefixes_of(given_trajectories):
    """Rows of the trie in preorder, each as the tuple of tokens down to it: lexicographic order is preorder."""
    return sorted({tuple(t[: k + 1]) for t in given_trajectories for k in range(len(t))})


@given(trajectories())
def test_from_trajectories_is_the_prefix_trie(given_trajectories):
    """Every array and every path equals what the sorted set of prefixes says."""
    tree = RolloutTree.from_trajectories(given_trajectories)
    tree.check()
    prefixes = prefixes_of(given_trajectories)
    row = {prefix: index for index, prefix in enumerate(prefixes)}
    assert tree.num_tokens == len(prefixes)
    assert tree.token_ids.tolist() == [prefix[-1] for prefix in prefixes]
    assert tree.depth.tolist() == [len(prefix) - 1 for prefix in prefixes]
    assert tree.parent.tolist() == [row.get(prefix[:-1], -1) for prefix in prefixes]
    below = [[other for other in prefixes if other[: len(prefix)] == prefix] for prefix in prefixes]
    assert tree.subtree_end.tolist() == [row[rows[-1]] + 1 for rows in below]
    through = [sum(tuple(t[: len(prefix)]) == prefix for t in given_trajectories) for prefix in prefixes]
    assert tree.occurrence_counts.tolist() == through
    for index, trajectory in enumerate(given_trajectories):
        path = tree.path(index)
        assert path.tolist() == [row[tuple(trajectory[: k + 1])] for k in range(len(trajectory))]
        assert tree.token_ids[path].tolist() == trajectory
    assert tree.trajectory_lengths.tolist() == [len(t) for t in given_trajectories]
    assert tree.num_expanded_tokens == sum(map(len, given_trajectories))
    assert tree.sharing_ratio == sum(map(len, given_trajectories)) / len(prefixes)


@given(trajectories())
def test_order_of_trajectories_does_not_matter(given_trajectories):
    """The rows depend on the set of trajectories only; end rows follow the order given."""
    tree = RolloutTree.from_trajectories(given_trajectories)
    turned = RolloutTree.from_trajectories(given_trajectories[::-1])
    assert np.array_equal(tree.token_ids, turned.token_ids) and np.array_equal(tree.parent, turned.parent)
    assert np.array_equal(tree.occurrence_counts, turned.occurrence_counts)
    assert np.array_equal(tree.end_rows, turned.end_rows[::-1])


@given(trajectories(), trajectories())
def test_rows_found_in_another_tree(given_trajectories, others):
    """Those with the same tokens up to them."""
    tree, other = RolloutTree.from_trajectories(given_trajectories), RolloutTree.from_trajectories(others)
    row = {prefix: index for index, prefix in enumerate(prefixes_of(others))}
    expected = [row.get(prefix, -1) for prefix in prefixes_of(given_trajectories)]
    assert matching_rows(tree, other).tolist() == expected
    assert np.array_equal(matching_rows(tree, tree), np.arange(tree.num_tokens))


@given(trajectories())
def test_segments_are_maximal_runs_without_branching(given_trajectories):
    """A segment starts at a root or below a branching row, and nowhere else."""
    tree = RolloutTree.from_trajectories(given_trajectories)
    children = [int((tree.parent == row).sum()) for row in range(tree.num_tokens)]
    assert tree.num_children.tolist() == children
    below = [np.flatnonzero(tree.parent == row).tolist() for row in range(tree.num_tokens)]
    assert [part.tolist() for part in np.split(tree.children, tree.child_ptr[1:-1])] == below
    starts = [row for row in range(tree.num_tokens) if tree.parent[row] < 0 or children[tree.parent[row]] > 1]
    assert tree.segment_starts.tolist() == starts
    for segment, start in enumerate(starts):
        above = int(tree.parent[start])
        expected = -1 if above < 0 else max(s for s, first in enumerate(starts) if first <= above)
        assert tree.segment_parent[segment] == expected


@given(shapes())
def test_from_shape_equals_from_trajectories(shape):
    """A shape whose siblings begin with different tokens gives the trie of the trajectories it describes."""
    parent, length, sample_node = shape
    # The token is unique to its node and place: siblings differ, and ascending nodes are ascending tokens.
    tokens = [[100 * node + place for place in range(length[node])] for node in range(len(parent))]
    paths = []
    for node in sample_node:
        path = []
        while node >= 0:
            path, node = tokens[node] + path, parent[node]
        paths.append(path)
    tree = RolloutTree.from_shape(parent, length, sample_node, token_ids=[token for node in tokens for token in node])
    tree.check()
    expected = RolloutTree.from_trajectories(paths)
    # Nodes without tokens let cousins interleave, so the rows are compared path by path and as sets.
    for index, (path, rows) in enumerate(zip(paths, tree.paths(), strict=True)):
        assert tree.token_ids[tree.path(index)].tolist() == path
        assert rows.tolist() == tree.path(index).tolist()
    some = range(len(paths) - 1, -1, -2)
    assert [rows.tolist() for rows in tree.paths(some)] == [tree.path(index).tolist() for index in some]
    assert sorted(tree.token_ids) == sorted(expected.token_ids)
    by_token = np.argsort(tree.token_ids), np.argsort(expected.token_ids)
    for name in ("depth", "occurrence_counts"):
        assert getattr(tree, name)[by_token[0]].tolist() == getattr(expected, name)[by_token[1]].tolist()
    bare = RolloutTree.from_shape(parent, length, sample_node)
    assert np.array_equal(bare.parent, tree.parent) and not bare.has_token_ids
    with pytest.raises(ValueError, match="no token ids"):
        _ = bare.token_ids


def test_small_tree_by_hand():
    """Equal trajectories, one inside another, one token alone, two roots: rows that a person can check."""
    tree = RolloutTree.from_trajectories([[5, 1, 2], [5, 1, 2], [5, 1], [5, 3], [9]])
    assert tree.token_ids.tolist() == [5, 1, 2, 3, 9]
    assert tree.parent.tolist() == [-1, 0, 1, 0, -1]
    assert tree.depth.tolist() == [0, 1, 2, 1, 0]
    assert tree.subtree_end.tolist() == [4, 3, 3, 4, 5]
    assert tree.occurrence_counts.tolist() == [4, 3, 2, 1, 1]
    assert tree.end_rows.tolist() == [2, 2, 1, 3, 4]
    assert tree.path(3).tolist() == [0, 3]
    assert repr(tree) == "RolloutTree(trajectories=5, tokens=5, expanded=11, sharing_ratio=2.20)"


def test_tokens_beyond_32_bits_keep_their_order():
    """Wide ids are compared by value."""
    tree = RolloutTree.from_trajectories([[2**40, 1], [2**40, 2**33], [3]])
    assert tree.token_ids.tolist() == [3, 2**40, 1, 2**33]
    tree.check()


def test_long_prefixes_are_compared_past_one_block():
    """The longest common prefix crosses the 4,096-token blocks in which it is looked for."""
    common = np.arange(9000) % 7
    for length in (1, 4095, 4096, 4097, 8192, 9000):
        tree = RolloutTree.from_trajectories([np.append(common[:length], 8), np.append(common[:length], 9)])
        assert tree.num_tokens == length + 2
        tree.check()


def test_arrays_are_read_only():
    """Nobody can change a tree that others hold."""
    tree = RolloutTree.from_trajectories([[1, 2]])
    for array in (tree.parent, tree.depth, tree.subtree_end, tree.end_rows, tree.occurrence_counts, tree.token_ids):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_given_arrays_are_not_kept():
    """A caller's array can be changed afterwards, and stays writeable."""
    tokens = np.array([1, 2, 3])
    tree = RolloutTree.from_trajectories([tokens])
    shape = RolloutTree.from_shape([-1], [3], [0], token_ids=tokens)
    tokens[0] = 7
    assert tree.token_ids[0] == 1 and shape.token_ids[0] == 1


@pytest.mark.parametrize(
    ("given_trajectories", "message"),
    [
        ([], "at least one trajectory"),
        ([[1], []], "trajectory 1 to have at least one token"),
        ([[1], [[2]]], r"trajectory 1 to be 1-D, got shape \(1, 1\)"),
        ([[1.0, 2.0]], "trajectory 0 to hold integers, got dtype float64"),
        ([[True, False]], "trajectory 0 to hold integers, got dtype bool"),
        ([[1, -2]], "at least 0, got -2 in trajectory 0"),
        ([np.array([1, 2**63], np.uint64)], "below 2\\*\\*63, got 9223372036854775808 in trajectory 0"),
    ],
)
def test_bad_trajectories(given_trajectories, message):
    """Each kind of bad trajectory is named."""
    with pytest.raises(ValueError, match=message):
        RolloutTree.from_trajectories(given_trajectories)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (([], [], []), "parent to be a non-empty"),
        (([-1], [1.5], [0]), "length to be a non-empty 1-D integer array, got float64"),
        (([-1, 0], [1], [0]), "one size, got 2 and 1"),
        (([-1], [-1], [0]), "lengths of at least 0, got -1"),
        (([-1, 1], [1, 1], [1]), r"got parent\[1\] = 1"),
        (([-2], [1], [0]), r"got parent\[0\] = -2"),
        (([-1], [1], [1]), r"sample_node in \[0, 1\), got 1 to 1"),
        (([-1, 0], [0, 1], [0, 1]), "got trajectory 0 with none"),
        (([-1, 0], [1, 1], [0]), "none through node 1"),
    ],
)
def test_bad_shapes(shape, message):
    """Each contradiction of a shape is named."""
    with pytest.raises(ValueError, match=message):
        RolloutTree.from_shape(*shape)


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [([1, 2], "expected 3 token ids"), ([1, 2, 2], "token 2 twice below row 0"), ([1, 2, -1], "at least 0, got -1")],
)
def test_bad_tokens_of_a_shape(token_ids, message):
    """Tokens that do not fit the shape, or that would merge two segments, are named."""
    with pytest.raises(ValueError, match=message):
        RolloutTree.from_shape([-1, 0, 0], [1, 1, 1], [1, 2], token_ids=token_ids)


def test_path_of_no_trajectory():
    """A trajectory that does not exist is an IndexError."""
    with pytest.raises(IndexError):
        RolloutTree.from_trajectories([[1]]).path(1)


@pytest.mark.parametrize("name", SHAPE_NAMES)
def test_counts_of_real_rollouts(name):
    """Groups, trajectories, expanded and unique tokens, ratio and longest path equal the table of the data."""
    trees = shape_trees(name)
    for tree in trees:
        tree.check()
    expanded = sum(tree.num_expanded_tokens for tree in trees)
    unique = sum(tree.num_tokens for tree in trees)
    longest = max(int(tree.trajectory_lengths.max()) for tree in trees)
    count = sum(tree.num_trajectories for tree in trees)
    assert (len(trees), count, expanded, unique, round(expanded / unique, 2), longest) == TABLE[name]
