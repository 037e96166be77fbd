"""The rollout tree: the prefix trie of a set of trajectories, one row per unique token (NumPy only).

Rows stand in depth-first preorder, so three integer arrays say everything: ``v`` is an ancestor of ``u`` or ``u``
itself if and only if ``v <= u < subtree_end[v]``; the position id of a row is ``depth``; and token ``u`` of depth
above 0 has exactly one predictor, row ``parent[u]``.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

IntArray = NDArray[np.int64]


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
        ends_before = np.zeros(len(parent) + 1, np.int64)
        np.cumsum(np.bincount(end_rows, minlength=len(parent)), out=ends_before[1:])
        self.occurrence_counts = ends_before[subtree_end] - ends_before[:-1]
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
        checked = [_as_token_array(trajectory, index) for index, trajectory in enumerate(trajectories)]
        if not checked:
            raise ValueError("expected at least one trajectory, got none")
        # Big-endian bytes of non-negative ints compare as the ints do, and bytes compare with memcmp.
        width = 8 if any(largest > 0x7FFFFFFF for _, largest in checked) else 4
        keys = [array.astype(f">i{width}").tobytes() for array, _ in checked]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        words = [np.frombuffer(keys[i], f"u{width}") for i in order]  # half of what there is to read, to tell apart
        shared = [0] + [_common_prefix(a, b) for a, b in pairwise(words)]
        return cls._from_sorted([checked[i][0] for i in order], shared, np.asarray(order, np.int64))

    @classmethod
    def _from_sorted(cls, arrays: list[IntArray], shared: list[int], order: IntArray) -> "RolloutTree":
        lengths = np.fromiter(map(len, arrays), np.int64, len(arrays))
        shared_lengths = np.asarray(shared, np.int64)
        starts = np.zeros(len(arrays) + 1, np.int64)
        np.cumsum(lengths - shared_lengths, out=starts[1:])
        num_rows = int(starts[-1])
        token_ids = np.concatenate([array[skip:] for array, skip in zip(arrays, shared, strict=True)])
        depth = np.arange(num_rows) - np.repeat(starts[:-1] - shared_lengths, np.diff(starts))

        parent = np.arange(-1, num_rows - 1)
        subtree_end = np.full(num_rows, num_rows, np.int64)
        end_rows = np.empty(len(arrays), np.int64)
        # The path of the current trajectory as runs of rows: [first depth, first row, number of rows still open].
        path: list[list[int]] = []
        for index, (keep, start, length) in enumerate(
            zip(shared, starts[:-1].tolist(), lengths.tolist(), strict=True)
        ):
            while path and path[-1][0] >= keep and keep < length:
                _, row, count = path.pop()
                subtree_end[row : row + count] = start
            if keep < length:
                if path:
                    first_depth, row, count = path[-1]
                    open_rows = keep - first_depth
                    subtree_end[row + open_rows : row + count] = start
                    path[-1][2] = open_rows
                    parent[start] = row + open_rows - 1
                else:
                    parent[start] = -1
                path.append([keep, start, length - keep])
            first_depth, row, _ = path[-1]
            end_rows[order[index]] = row + length - 1 - first_depth
        return cls(parent=parent, depth=depth, subtree_end=subtree_end, end_rows=end_rows, token_ids=token_ids)

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
            given, _ = _as_token_array(token_ids, None)
            if len(given) != num_rows:
                raise ValueError(f"expected {num_rows} token ids (the sum of length), got {len(given)}")
            given_starts = np.cumsum(counts) - counts
            tokens = given[np.repeat(given_starts[filled] - starts[filled], counts[filled]) + rows]
            _check_siblings_differ(row_parent, tokens)
        tree = cls(
            parent=row_parent, depth=depth, subtree_end=subtree_end, end_rows=last_row[samples], token_ids=tokens
        )
        if (tree.occurrence_counts == 0).any():
            row = int(np.flatnonzero(tree.occurrence_counts == 0)[0])
            node = int(filled[np.searchsorted(starts[filled], row, side="right") - 1])
            raise ValueError(f"expected a trajectory through every node, got none through node {node}")
        return tree

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
            _check_siblings_differ(self.parent, self._token_ids)

    def __repr__(self) -> str:
        return (
            f"RolloutTree(trajectories={self.num_trajectories}, tokens={self.num_tokens}, "
            f"expanded={self.num_expanded_tokens}, sharing_ratio={self.sharing_ratio:.2f})"
        )


def _as_token_array(tokens: Any, index: int | None) -> tuple[IntArray, int]:
    """Token ids as int64 (a copy where they are a tree's own, ``index`` None), and the largest of them."""
    name = "token_ids" if index is None else f"trajectory {index}"
    array = np.asarray(tokens)
    if array.ndim != 1:
        raise ValueError(f"expected {name} to be 1-D, got shape {array.shape}")
    if array.size == 0:
        raise ValueError(f"expected {name} to have at least one token, got an empty one")
    if array.dtype.kind not in "iu":
        raise ValueError(f"expected {name} to hold integers, got dtype {array.dtype}")
    wide: IntArray = array.astype(np.int64, copy=index is None)
    largest = int(wide.view(np.uint64).max())  # negative ones are the largest as unsigned: one look, not two
    if largest > _LARGEST_ID:
        if array.dtype.kind == "u":
            raise ValueError(f"expected token ids below 2**63, got {array.max()} in {name}")
        raise ValueError(f"expected token ids of at least 0, got {array.min()} in {name}")
    return wide, largest


_LARGEST_ID = 2**63 - 1
# Neighbours mostly differ late or early: a block of tokens at a time stops at the first difference.
_BLOCK = 8192


def _common_prefix(first: NDArray[Any], second: NDArray[Any]) -> int:
    size = min(len(first), len(second))
    for start in range(0, size, _BLOCK):
        differ = first[start : min(start + _BLOCK, size)] != second[start : min(start + _BLOCK, size)]
        position = int(differ.argmax())
        if differ[position]:
            return start + position
    return size


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


def _check_siblings_differ(parent: IntArray, token_ids: IntArray) -> None:
    order = np.lexsort((token_ids, parent))
    same = (parent[order][1:] == parent[order][:-1]) & (token_ids[order][1:] == token_ids[order][:-1])
    if same.any():
        row = int(order[1:][same][0])
        raise ValueError(
            f"expected siblings to begin with different tokens, got token {token_ids[row]} twice "
            f"below row {parent[row]}"
        )
