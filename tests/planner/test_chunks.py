"""The chunk tree against brute force: the set of paths down to chunk ends and to leaves."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import shapes

from harts_hf.planner import build_chunk_tree
from harts_hf.tree import RolloutTree


@st.composite
def trees_and_chunk_sizes(draw):
    """Trees whose segments are as long as a few chunks, so that branches fall on, before and after boundaries."""
    size = draw(st.sampled_from([1, 2, 4, 64]))
    parent, length, sample_node = draw(shapes())
    if size == 64:
        around = st.sampled_from([1, 2, 3, 62, 63, 64, 65, 127, 128, 129])
        length = [draw(around) if tokens else 0 for tokens in length]
    return RolloutTree.from_shape(parent, length, sample_node), size


def chunks_by_definition(tree, size):
    """{last row of a chunk node: its rows}: every chunk of every path, cut at the path's own end only at a leaf."""
    leaves = set(range(tree.num_tokens)) - set(tree.parent.tolist())
    nodes = {}
    for leaf in leaves:
        path = tree.path_to(leaf).tolist()
        for start in range(0, len(path), size):
            rows = path[start : start + size]
            nodes[rows[-1]] = rows
    return nodes


@given(trees_and_chunk_sizes())
def test_chunk_tree_equals_its_definition(tree_and_size):
    """Nodes, rows, parents, levels and owners are those of the definition."""
    tree, size = tree_and_size
    chunks = build_chunk_tree(tree.parent, tree.depth, size)
    nodes = chunks_by_definition(tree, size)
    ends = sorted(nodes)
    assert chunks.num_nodes == len(ends)
    assert chunks.linear_rows == sum(map(len, nodes.values()))
    assert chunks.replay_rows == chunks.linear_rows - tree.num_tokens
    assert (chunks.entry_row == -1).all()
    for node, end in enumerate(ends):
        rows = nodes[end]
        assert chunks.rows[node].tolist() == rows + [-1] * (size - len(rows))
        assert chunks.lengths[node] == len(rows)
        above = int(tree.parent[rows[0]])
        assert chunks.parent[node] == (ends.index(above) if above >= 0 else -1)
        assert chunks.level[node] == tree.depth[end] // size
    for row in range(tree.num_tokens):
        first = next(node for node, end in enumerate(ends) if row in nodes[end])
        assert chunks.owner[row] == first
        assert chunks.rows[first, chunks.owner_slot[row]] == row


@given(trees_and_chunk_sizes(), st.data())
def test_part_of_a_tree_starts_from_boundary_states(tree_and_size, data):
    """The rows from a chunk boundary on, taken alone, have the same nodes and say which start from outside."""
    tree, size = tree_and_size
    first_depth = size * data.draw(st.integers(1, 3))
    rows = np.flatnonzero(tree.depth >= first_depth)
    if rows.size == 0:
        return
    position = np.full(tree.num_tokens + 1, -1)
    position[rows] = np.arange(len(rows))
    part = build_chunk_tree(position[tree.parent[rows]], tree.depth[rows], size)
    whole = build_chunk_tree(tree.parent, tree.depth, size)
    kept = np.flatnonzero(tree.depth[whole.rows[:, 0]] >= first_depth)
    assert np.array_equal(np.append(rows, -1)[part.rows], whole.rows[kept])
    starts_outside = tree.depth[whole.rows[kept, 0]] == first_depth
    assert np.array_equal(part.entry_row >= 0, starts_outside)
    assert np.array_equal(rows[part.entry_row[starts_outside]], whole.rows[kept, 0][starts_outside])
    assert np.array_equal(part.parent < 0, starts_outside)
    assert np.array_equal(part.level, whole.level[kept] - first_depth // size)


def test_replay_by_hand():
    """A branch at depth 3 of chunks of 4: each child's chunk takes the three rows before the branch again."""
    tree = RolloutTree.from_shape([-1, 0, 0], [3, 2, 1], [1, 2])
    chunks = build_chunk_tree(tree.parent, tree.depth, 4)
    assert chunks.rows.tolist() == [[0, 1, 2, 3], [4, -1, -1, -1], [0, 1, 2, 5]]
    assert chunks.parent.tolist() == [-1, 0, -1]
    assert chunks.level.tolist() == [0, 1, 0]
    assert chunks.owner.tolist() == [0, 0, 0, 0, 1, 2]
    assert chunks.replay_rows == 3


def test_root_inside_a_chunk_is_refused():
    """A part whose root does not begin a chunk lacks the chunk's earlier rows."""
    with pytest.raises(ValueError, match="multiples of 4, got row 0 at depth 6"):
        build_chunk_tree(np.array([-1, 0]), np.array([6, 7]), 4)
