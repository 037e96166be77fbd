"""The rows of one tree found in another by the tokens up to them."""

import numpy as np

from harts_hf.tree.arrays import IntArray
from harts_hf.tree.rollout_tree import RolloutTree


def matching_rows(tree: RolloutTree, other: RolloutTree) -> IntArray:
    """For each row of a tree, the row of another whose path has the same tokens.

    Args:
        tree: with tokens.
        other: with tokens, whose siblings begin with different ones.

    Returns:
        ``[N]`` int64, rows of ``other``; -1 for none.

    Complexity:
        O(N) NumPy work over unique tokens; a few calls per segment of either tree, unless the trees are equal. Rows do
        not depend on the order of trajectories, so trees of the same ones are.
    """
    if np.array_equal(tree.token_ids, other.token_ids) and np.array_equal(tree.parent, other.parent):
        return np.arange(tree.num_tokens)
    found = np.full(tree.num_tokens, -1)
    roots = np.flatnonzero(other.parent < 0)
    segment_ends = np.append(other.segment_starts[1:], other.num_tokens)
    starts = tree.segment_starts
    for row, stop in zip(starts.tolist(), np.append(starts[1:], tree.num_tokens).tolist(), strict=True):
        parent = int(tree.parent[row])
        above = -1 if parent < 0 else int(found[parent])
        if parent >= 0 and above < 0:
            continue
        while row < stop:
            below = roots if above < 0 else other.children[other.child_ptr[above] : other.child_ptr[above + 1]]
            (equal,) = np.nonzero(other.token_ids[below] == tree.token_ids[row])
            if not len(equal):
                break
            first = int(below[equal[0]])
            end = int(segment_ends[np.searchsorted(segment_ends, first, side="right")])
            size = min(stop - row, end - first)
            differ = np.flatnonzero(tree.token_ids[row : row + size] != other.token_ids[first : first + size])
            same = int(differ[0]) if len(differ) else size
            found[row : row + same] = np.arange(first, first + same)
            if same < size:
                break
            row, above = row + size, first + size - 1
    return found
