"""The chunk tree: how linear attention walks a rollout tree chunk by chunk (NumPy only).

A trajectory trained alone is cut at depths 0, C, 2C, ...; to keep its numerical path the tree is cut at the same
depths. A *chunk node* is a chunk of some trajectory, identified by the whole path up to its end; a branch inside a
chunk gives each child a node of its own, and the rows before the branch are *replayed* in each.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from harts_hf.planner.spans import expand_ranges
from harts_hf.tree import IntArray

CHUNK_SIZE = 64


@dataclass(frozen=True, eq=False, kw_only=True)
class SegmentChunks:
    """Where the chunks of segments end: at depths that are multiples of C, and at the end of each segment.

    Ends stand segment by segment, ascending within each. All arrays are ``[K]``.

    Attributes:
        segment: the segment of each end.
        stop: depth after the end, which is above the segment's first depth and at most the depth after its last row.
        rows: rows of the chunk that lie above ``stop``, 1 to C, those of segments further up included.
        is_last: bool, whether it is the segment's own end.
    """

    segment: IntArray
    stop: IntArray
    rows: IntArray
    is_last: NDArray[np.bool_]

    @classmethod
    def of(cls, depth: IntArray, length: IntArray, chunk_size: int) -> "SegmentChunks":
        """Of segments that begin at ``depth`` [S] and hold ``length`` [S] rows, at least 1."""
        end = depth + length
        segment, chunk = expand_ranges(depth // chunk_size, -(-end // chunk_size))
        stop = np.minimum((chunk + 1) * chunk_size, end[segment])
        rows = stop - chunk * chunk_size
        return cls(segment=segment, stop=stop, rows=rows, is_last=stop == end[segment])


Depth = TypeVar("Depth", int, IntArray)


def whole_chunk_rows(depth: Depth, chunk_size: int) -> Depth:
    """Rows of the whole chunks of a path of ``depth`` rows."""
    return depth // chunk_size * chunk_size


@dataclass(frozen=True, eq=False, kw_only=True)
class ChunkTree:
    """Chunk nodes over a forest of rows in preorder; nodes stand in the preorder of their last rows.

    Attributes:
        chunk_size: C, rows a full node holds.
        rows: ``[M, C]`` the rows of each node from its chunk's first depth on; -1 past its length.
        lengths: ``[M]`` number of rows of each node, 1 to C.
        parent: ``[M]`` the node whose outgoing state a node starts from, always below the node's own number; -1 where
            it starts from no state of this forest.
        entry_row: ``[M]`` for a node of parent -1 that does not begin at depth 0, its first row (whose parent lies
            outside the forest: the node starts from a boundary state); -1 elsewhere.
        level: ``[M]`` number of nodes above it in this forest.
        owner: ``[N]`` the node from which each row's output is taken: the first that holds it.
        owner_slot: ``[N]`` the row's place in that node.
    """

    chunk_size: int
    rows: IntArray
    lengths: IntArray
    parent: IntArray
    entry_row: IntArray
    level: IntArray
    owner: IntArray
    owner_slot: IntArray

    @property
    def num_nodes(self) -> int:
        """M."""
        return len(self.parent)

    @property
    def linear_rows(self) -> int:
        """Rows that the linear layers process, replay included."""
        return int(self.lengths.sum())

    @property
    def replay_rows(self) -> int:
        """Rows processed more than once, counted without their first time."""
        return self.linear_rows - len(self.owner)


def build_chunk_tree(parent: IntArray, depth: IntArray, chunk_size: int = CHUNK_SIZE) -> ChunkTree:
    """Cuts a forest into chunk nodes.

    Args:
        parent: ``[N]`` the row before each row, below the row's own number; -1 at the roots of the forest. Rows stand
            in preorder. A root may lie at any depth that is a multiple of ``chunk_size`` (the forest is then a part of
            a tree and the node starts from a boundary state).
        depth: ``[N]`` depth in the whole tree.
        chunk_size: C.

    Raises:
        ValueError: a root at a depth that is not a multiple of ``chunk_size``: its chunk's earlier rows are missing.

    Complexity: O(N + C * M) NumPy work for M nodes, times the most branches above which a chunk's path stands.
    """
    roots = parent < 0
    if (depth[roots] % chunk_size != 0).any():
        row = int(np.flatnonzero(roots & (depth % chunk_size != 0))[0])
        raise ValueError(
            f"expected roots at depths that are multiples of {chunk_size}, got row {row} at depth {depth[row]}"
        )
    num_rows = len(parent)
    is_end = np.ones(num_rows, bool)
    is_end[parent[~roots]] = False
    is_end |= depth % chunk_size == chunk_size - 1
    ends = np.flatnonzero(is_end)
    lengths = depth[ends] % chunk_size + 1
    rows = _rows_of_nodes(parent, ends, lengths, chunk_size)
    first_rows = rows[:, 0]
    row_above = parent[first_rows]
    node_of_end = np.full(num_rows + 1, -1, np.int64)
    node_of_end[ends] = np.arange(len(ends))
    node_parent = node_of_end[row_above]  # row_above -1 reads the last entry, -1
    entry_row = np.where((node_parent < 0) & (depth[first_rows] > 0), first_rows, -1)
    return ChunkTree(
        chunk_size=chunk_size,
        rows=rows,
        lengths=lengths,
        parent=node_parent,
        entry_row=entry_row,
        level=_levels(node_parent, depth[ends] // chunk_size),
        owner=np.cumsum(is_end) - is_end,  # ends before each row
        owner_slot=depth % chunk_size,
    )


def _rows_of_nodes(parent: IntArray, ends: IntArray, lengths: IntArray, chunk_size: int) -> IntArray:
    """``[M, C]`` the rows of paths of ``lengths`` that end at ``ends``, -1 past them.

    Rows that follow their parent at once stand in runs, so a path is a few of them: a NumPy step for each of the path
    that has most.
    """
    number = np.arange(len(parent))
    run_start = np.maximum.accumulate(np.where(parent != number - 1, number, 0))
    slot = np.arange(chunk_size)
    first = ends - lengths + 1
    rows = first[:, None] + slot
    rows[slot >= lengths[:, None]] = -1
    left, last = lengths, ends
    nodes = np.flatnonzero(run_start[ends] > first)
    while nodes.size:
        start = run_start[last[nodes]]
        left, last = left.copy(), last.copy()
        left[nodes] -= last[nodes] - start + 1
        last[nodes] = parent[start]
        before = (last - left)[nodes, None] + 1 + slot
        rows[nodes] = np.where(slot < left[nodes, None], before, rows[nodes])
        nodes = nodes[run_start[last[nodes]] > last[nodes] - left[nodes] + 1]
    return rows


def _levels(parent: IntArray, chunk_index: IntArray) -> IntArray:
    """Number of nodes above each node; ``chunk_index`` grows by one from a node to its child."""
    roots = parent < 0
    if not chunk_index[roots].any():
        return chunk_index
    top = np.where(roots, np.arange(len(parent)), parent)
    while not roots[top].all():  # twice as far up each time
        top = top[top]
    return chunk_index - chunk_index[top]
