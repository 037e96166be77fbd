"""A tree laid out from its segments: their parents and lengths, and where trajectories end."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from harts_hf.tree.arrays import IntArray, TreeArrays, as_token_array, check_siblings_differ, count_occurrences


def lay_out(
    parent: ArrayLike, length: ArrayLike, sample_node: ArrayLike, token_ids: ArrayLike | None = None
) -> TreeArrays:
    """See :meth:`harts_hf.RolloutTree.from_shape`."""
    above, counts, samples = _check_shape(parent, length, sample_node)
    order, node_end = _preorder_of_nodes(above)
    starts = np.zeros(len(above), np.int64)
    starts[order] = np.cumsum(counts[order]) - counts[order]
    num_rows = int(counts.sum())

    # The last row at or above each node's end, through nodes without tokens; and the depth where each begins.
    last_row = np.empty(len(above), np.int64)
    first_depth = np.zeros(len(above), np.int64)
    row_above = np.full(len(above), -1, np.int64)
    for node in range(len(above)):
        if above[node] >= 0:
            row_above[node] = last_row[above[node]]
            first_depth[node] = first_depth[above[node]] + counts[above[node]]
        last_row[node] = starts[node] + counts[node] - 1 if counts[node] else row_above[node]
    if (last_row[samples] < 0).any():
        index = int(np.flatnonzero(last_row[samples] < 0)[0])
        raise ValueError(f"expected trajectories of at least one token, got trajectory {index} with none")

    filled = order[counts[order] > 0]
    row_node_start = np.repeat(starts[filled], counts[filled])
    rows = np.arange(num_rows)
    depth = rows - row_node_start + np.repeat(first_depth[filled], counts[filled])
    row_parent = rows - 1
    row_parent[starts[filled]] = row_above[filled]
    rows_of_subtree = np.zeros(len(above) + 1, np.int64)
    np.cumsum(counts[order], out=rows_of_subtree[1:])
    subtree_end = np.repeat(rows_of_subtree[node_end[filled]], counts[filled])
    tokens = None
    if token_ids is not None:
        given, _ = as_token_array(token_ids, None)
        if len(given) != num_rows:
            raise ValueError(f"expected {num_rows} token ids (the sum of length), got {len(given)}")
        given_starts = np.cumsum(counts) - counts
        tokens = given[np.repeat(given_starts[filled] - starts[filled], counts[filled]) + rows]
        check_siblings_differ(row_parent, tokens)
    occurrences = count_occurrences(subtree_end, last_row[samples])
    if (occurrences == 0).any():
        row = int(np.flatnonzero(occurrences == 0)[0])
        node = int(filled[np.searchsorted(starts[filled], row, side="right") - 1])
        raise ValueError(f"expected a trajectory through every node, got none through node {node}")
    return TreeArrays(
        parent=row_parent, depth=depth, subtree_end=subtree_end, end_rows=last_row[samples], token_ids=tokens
    )


def _check_shape(parent: ArrayLike, length: ArrayLike, sample_node: ArrayLike) -> tuple[IntArray, IntArray, IntArray]:
    arrays = []
    for name, value in (("parent", parent), ("length", length), ("sample_node", sample_node)):
        array = np.asarray(value)
        if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
            raise ValueError(f"expected {name} to be a non-empty 1-D integer array, got {array.dtype} {array.shape}")
        arrays.append(array.astype(np.int64))
    above, counts, samples = arrays
    if len(above) != len(counts):
        raise ValueError(f"expected parent and length of one size, got {len(above)} and {len(counts)}")
    if (counts < 0).any():
        raise ValueError(f"expected lengths of at least 0, got {counts.min()}")
    wrong = np.flatnonzero((above < -1) | (above >= np.arange(len(above))))
    if wrong.size:
        raise ValueError(
            f"expected parent[i] in [-1, i), got parent[{wrong[0]}] = {above[wrong[0]]}: a node follows its parent"
        )
    if samples.min() < 0 or samples.max() >= len(above):
        raise ValueError(f"expected sample_node in [0, {len(above)}), got {samples.min()} to {samples.max()}")
    return above, counts, samples


def _preorder_of_nodes(parent: IntArray) -> tuple[IntArray, IntArray]:
    """Preorder of a forest whose nodes stand after their parents.

    Returns:
        ``order`` [S], the nodes in preorder, and ``end`` [S], the exclusive end of each node's subtree's positions
        in ``order``.
    """
    size = np.ones(len(parent), np.int64)
    above: Sequence[int] = parent.tolist()
    for node in range(len(parent) - 1, -1, -1):
        if above[node] >= 0:
            size[above[node]] += size[node]
    position = np.empty(len(parent), np.int64)
    next_position = np.empty(len(parent) + 1, np.int64)
    next_position[-1] = 0  # the position for the next root
    for node, node_above in enumerate(above):
        position[node] = next_position[node_above]
        next_position[node_above] += size[node]
        next_position[node] = position[node] + 1
    order = np.empty(len(parent), np.int64)
    order[position] = np.arange(len(parent))
    return order, position + size
