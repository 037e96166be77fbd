"""The baseline that collapses nested prefixes, and nothing else: a trajectory that another begins with is not run."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from harts_hf.forest import expand_tree
from harts_hf.runtime.planning import WindowPlanner
from harts_hf.runtime.window import TreeWindow
from harts_hf.tree import RolloutTree


def is_contained(tree: RolloutTree) -> NDArray[np.bool_]:
    """``[n]`` whether a trajectory is the beginning of another, or equal to one before it."""
    inside = tree.subtree_end[tree.end_rows] > tree.end_rows + 1
    first = np.zeros(tree.num_trajectories, bool)
    first[np.unique(tree.end_rows, return_index=True)[1]] = True
    return inside | ~first


def collapse(tree: RolloutTree) -> RolloutTree:
    """The same trajectories, in order, on rows of their own but for those that begin another: they lie on its rows.

    Of several that a trajectory begins, it lies on the one that comes first in the tree's preorder.
    """
    contained = is_contained(tree)
    if not contained.any():
        return expand_tree(tree)
    leaves = np.sort(tree.end_rows[~contained])
    chains = expand_tree(_with_ends(tree, leaves))
    first = chains.end_rows - chains.depth[chains.end_rows]
    # The first kept leaf at or behind a row of the tree is below it: leaves ascend, and every row has one below.
    holder = np.searchsorted(leaves, tree.end_rows)
    ends = first[holder] + tree.depth[tree.end_rows]
    return _with_ends(chains, ends)


def _with_ends(tree: RolloutTree, end_rows: NDArray[np.int64]) -> RolloutTree:
    """The same rows with other trajectories."""
    return RolloutTree(
        parent=tree.parent, depth=tree.depth, subtree_end=tree.subtree_end, end_rows=end_rows,
        token_ids=tree.token_ids if tree.has_token_ids else None,
    )  # fmt: skip


class CollapsingPlanner(WindowPlanner):
    """Plans windows that share nothing but nested prefixes; its configuration has to say ``sharing="always"``."""

    def __call__(self, trajectories: Sequence[ArrayLike] | RolloutTree, *, rank: int | None = None) -> TreeWindow:
        """As :class:`WindowPlanner`, of the collapsed tree."""
        tree = trajectories if isinstance(trajectories, RolloutTree) else RolloutTree.from_trajectories(trajectories)
        return super().__call__(collapse(tree), rank=rank)
