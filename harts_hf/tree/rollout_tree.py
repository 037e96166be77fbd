"""The rollout tree: the prefix trie of a set of trajectories, one row per unique token (NumPy only).

Rows stand in depth-first preorder, so three integer arrays say everything: ``v`` is an ancestor of ``u`` or ``u``
itself if and only if ``v <= u < subtree_end[v]``; the position id of a row is ``depth``; and token ``u`` of depth
above 0 has exactly one predictor, row ``parent[u]``.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from harts_hf.tree.arrays import IntArray, check_siblings_differ, count_occurrences
from harts_hf.tree.merging import merge
from harts_hf.tree.segments import lay_out


class RolloutTree:
    """Prefix trie of trajectories by exact token equality, in depth-first preorder.

    Trajectories may end inside the tree, may be equal to one another, and may have different first tokens (several
    roots). Build it with :meth:`from_trajectories` or :meth:`from_shape`; the arrays are read-only.

    Attributes:
        parent: ``[N]`` int64, the row before a row on its path; -1 at a root.
        depth: ``[N]`` int64, position of the token in every trajectory through it (0 at a root).
        subtree_end: ``[N]`` int64, exclusive end of the rows below; ``u`` itself is the first of them.
        occurrence_counts: ``[N]`` int64, how many trajectories pass through a row (at least 1).
        end_rows: ``[num_trajectories]`` int64, the row where each trajectory ends, in the order given.
    """

    def __init__(
        self,
        *,
        parent: IntArray,
        depth: IntArray,
        subtree_end: IntArray,
        end_rows: IntArray,
        token_ids: IntArray | None,
    ) -> None:
        self.parent = parent
        self.depth = depth
        self.subtree_end = subtree_end
        self.end_rows = end_rows
        self._token_ids = token_ids
        self.occurrence_counts = count_occurrences(subtree_end, end_rows)
        for array in (parent, depth, subtree_end, end_rows, self.occurrence_counts):
            array.flags.writeable = False
        if token_ids is not None:
            token_ids.flags.writeable = False

    # ---- construction -------------------------------------------------------------------------------------------

    @classmethod
    def from_trajectories(cls, trajectories: Iterable[ArrayLike]) -> "RolloutTree":
        """Merges trajectories into their prefix trie.

        Args:
            trajectories: 1-D integer arrays (or lists) of token ids, each at least one token long, ids at least 0.

        Returns:
            The tree. Siblings stand in ascending order of their first token, so the rows do not depend on the order
            of the trajectories; ``path(i)`` and ``end_rows[i]`` follow the order given.

        Raises:
            ValueError: no trajectory; an empty one; one that is not 1-D, not of integers, or has a negative id.

        Complexity:
            O(E) NumPy work over the E expanded tokens plus O(T log T) comparisons of whole trajectories and O(T)
            Python steps for T trajectories; no Python loop over tokens.
        """
        return cls(**merge(trajectories)._asdict())

    @classmethod
    def from_shape(
        cls,
        parent: ArrayLike,
        length: ArrayLike,
        sample_node: ArrayLike,
        token_ids: ArrayLike | None = None,
    ) -> "RolloutTree":
        """Builds a tree from its segments instead of its tokens.

        Args:
            parent: ``[S]`` the node above each node, -1 for a root; a node stands after its parent.
            length: ``[S]`` number of tokens of each node, at least 0 (0 is a bare joint, such as an empty root).
            sample_node: ``[T]`` the node at whose end each trajectory ends.
            token_ids: ``[sum(length)]`` the tokens of all nodes, one node after the other; without them only counts
                and plans work.

        Returns:
            The tree; siblings keep the order of their node numbers.

        Raises:
            ValueError: arrays that contradict one another; a trajectory without tokens; a node that no trajectory
                passes through; two siblings that begin with the same token (they would be one segment).
        """
        return cls(**lay_out(parent, length, sample_node, token_ids)._asdict())

    def to_shape(self) -> dict[str, list[int]]:
        """The arguments of :meth:`from_shape` that build this tree's shape: segments, cut where trajectories end."""
        starts = np.union1d(self.segment_starts, self.end_rows + 1)
        starts = starts[starts < self.num_tokens]
        above = self.parent[starts]
        parent = np.where(above < 0, -1, np.searchsorted(starts, above, side="right") - 1)
        return {
            "parent": parent.tolist(),
            "length": np.diff(np.append(starts, self.num_tokens)).tolist(),
            "sample_node": (np.searchsorted(starts, self.end_rows, side="right") - 1).tolist(),
        }

    # ---- what it says -------------------------------------------------------------------------------------------

    @property
    def token_ids(self) -> IntArray:
        """``[N]`` int64 token ids.

        Raises:
            ValueError: the tree was built by :meth:`from_shape` without tokens.
        """
        if self._token_ids is None:
            raise ValueError("this tree has no token ids: it was built by from_shape(..., token_ids=None)")
        return self._token_ids

    @property
    def has_token_ids(self) -> bool:
        """Whether the tree carries tokens (a shape alone does not)."""
        return self._token_ids is not None

    @property
    def num_tokens(self) -> int:
        """N, the number of unique tokens (rows)."""
        return len(self.parent)

    @property
    def num_trajectories(self) -> int:
        """Number of trajectories, equal ones counted apart."""
        return len(self.end_rows)

    @property
    def trajectory_lengths(self) -> IntArray:
        """``[num_trajectories]`` tokens of each trajectory."""
        return self.depth[self.end_rows] + 1

    @property
    def num_expanded_tokens(self) -> int:
        """Sum of the trajectories' lengths: what training without sharing computes."""
        return int(self.trajectory_lengths.sum())

    @property
    def sharing_ratio(self) -> float:
        """Expanded tokens over unique tokens, at least 1."""
        return self.num_expanded_tokens / self.num_tokens

    @cached_property
    def num_children(self) -> IntArray:
        """``[N]`` number of rows directly below each row."""
        return np.bincount(self.parent[self.parent >= 0], minlength=self.num_tokens)

    @cached_property
    def child_ptr(self) -> IntArray:
        """``[N + 1]`` offsets of each row's children in :attr:`children`."""
        return np.append(0, np.cumsum(self.num_children))

    @cached_property
    def children(self) -> IntArray:
        """``[N - roots]`` the rows directly below row 0, then those below row 1, ..., ascending for each."""
        children = np.empty(int(self.child_ptr[-1]), np.int64)
        follows = self.parent == np.arange(-1, self.num_tokens - 1)
        follows[0] = False
        eldest = np.flatnonzero(follows)
        children[self.child_ptr[eldest - 1]] = eldest
        younger = np.flatnonzero(~follows & (self.parent >= 0))
        younger = younger[np.argsort(self.parent[younger], kind="stable")]
        above = self.parent[younger]
        children[self.child_ptr[above] + 1 + np.arange(len(above)) - np.searchsorted(above, above)] = younger
        return children

    @cached_property
    def segment_starts(self) -> IntArray:
        """``[S]`` first row of every segment (a maximal run of rows without branching), ascending."""
        # Rows that do not follow their parent at once are roots or younger siblings; with those, the eldest start too.
        younger = np.flatnonzero(self.parent != np.arange(-1, self.num_tokens - 1))
        above = self.parent[younger]
        is_start = np.zeros(self.num_tokens, bool)
        is_start[0] = is_start[younger] = is_start[above[above >= 0] + 1] = True
        return np.flatnonzero(is_start)

    @cached_property
    def segment_parent(self) -> IntArray:
        """``[S]`` the segment above each segment, -1 at a root."""
        above = self.parent[self.segment_starts]
        return np.where(above < 0, -1, np.searchsorted(self.segment_starts, above, side="right") - 1)

    def with_token_ids(self, token_ids: IntArray) -> "RolloutTree":
        """The same shape with other tokens, ``[N]`` int64. Siblings may then begin with the same one."""
        return RolloutTree(
            parent=self.parent,
            depth=self.depth,
            subtree_end=self.subtree_end,
            end_rows=self.end_rows,
            token_ids=token_ids,
        )

    def path(self, index: int) -> IntArray:
        """Compact rows of trajectory ``index``, ``[L]`` ascending, from its root to its end.

        Raises:
            IndexError: no such trajectory.
        """
        return self.path_to(int(self.end_rows[index]))

    def paths(self, indices: Sequence[int] | None = None) -> list[IntArray]:
        """:meth:`path` of several trajectories; of all if None.

        Complexity: one pass over the rows and the answer, a few calls per trajectory.
        """
        ends = self.end_rows if indices is None else self.end_rows[np.asarray(indices, np.int64)]
        open_rows = np.empty(int(self.depth.max()) + 1, np.int64)  # of each depth, the latest row
        found: list[IntArray] = [open_rows] * len(ends)
        filled = 0
        for index in np.argsort(ends, kind="stable").tolist():
            stop = int(ends[index]) + 1
            open_rows[self.depth[filled:stop]] = np.arange(filled, stop)  # of equal depths the last one stays
            filled = stop
            found[index] = open_rows[: self.depth[stop - 1] + 1].copy()
        return found

    def path_to(self, row: int) -> IntArray:
        """Rows from the root down to ``row``, itself included, ``[depth[row] + 1]`` ascending."""
        pieces = []
        segment = int(np.searchsorted(self.segment_starts, row, side="right")) - 1
        while segment >= 0:
            start = int(self.segment_starts[segment])
            pieces.append(np.arange(start, row + 1))
            segment, row = int(self.segment_parent[segment]), int(self.parent[start])
        return np.concatenate(pieces[::-1])

    def check(self) -> None:
        """Proves every invariant of the arrays; for tests.

        Raises:
            AssertionError: an invariant is broken.
        """
        rows = np.arange(self.num_tokens)
        inner = self.parent >= 0
        assert (self.parent < rows).all() and (self.parent >= -1).all()
        assert (self.depth[~inner] == 0).all()
        assert (self.depth[inner] == self.depth[self.parent[inner]] + 1).all()
        assert (self.subtree_end > rows).all() and (self.subtree_end <= self.num_tokens).all()
        assert (self.subtree_end[inner] <= self.subtree_end[self.parent[inner]]).all()
        previous_is_parent_or_leaf_end = (self.parent[1:] == rows[:-1]) | (self.subtree_end[:-1] == rows[1:])
        assert previous_is_parent_or_leaf_end.all()
        assert (self.occurrence_counts >= 1).all()
        assert self.occurrence_counts.sum() == self.num_expanded_tokens
        if self._token_ids is not None:
            check_siblings_differ(self.parent, self._token_ids)

    def __repr__(self) -> str:
        return (
            f"RolloutTree(trajectories={self.num_trajectories}, tokens={self.num_tokens}, "
            f"expanded={self.num_expanded_tokens}, sharing_ratio={self.sharing_ratio:.2f})"
        )
