"""The chunk tree: how linear attention walks a rollout tree chunk by chunk (NumPy only).

A trajectory trained alone is cut at depths 0, C, 2C, ...; to keep its numerical path the tree is cut at the same
depths. A *chunk node* is a chunk of some trajectory, identified by the whole path up to its end; a branch inside a
chunk gives each child a node of its own, and the rows before the branch are *replayed* in each.
"""

from dataclasses import dataclass
from itertools import pairwise
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

    Complexity: O(C * M) NumPy work for M nodes and one Python step per level of the chunk tree.
    """
    roots = parent < 0
    if (depth[roots] % chunk_size != 0).any():
        row = int(np.flatnonzero(roots & (depth % chunk_size != 0))[0])
        raise ValueError(
            f"expected roots at depths that are multiples of {chunk_size}, got row {row} at depth {depth[row]}"
        )
    num_rows = len(parent)
    has_child = np.zeros(num_rows, bool)
    has_child[parent[~roots]] = True
    ends = np.flatnonzero((depth % chunk_size == chunk_size - 1) | ~has_child)
    lengths = depth[ends] % chunk_size + 1
    rows = np.full((len(ends), chunk_size), -1, np.int64)
    current = ends.copy()
    active = np.arange(len(ends))
    for back in range(chunk_size):
        rows[active, lengths[active] - 1 - back] = current
        going_on = lengths[active] - 1 > back
        active = active[going_on]
        current = parent[current[going_on]]
    first_rows = rows[:, 0]
    row_above = parent[first_rows]
    node_of_end = np.full(num_rows + 1, -1, np.int64)
    node_of_end[ends] = np.arange(len(ends))
    node_parent = node_of_end[row_above]  # row_above -1 reads the last entry, -1
    entry_row = np.where((node_parent < 0) & (depth[first_rows] > 0), first_rows, -1)
    owner = np.searchsorted(ends, np.arange(num_rows))
    return ChunkTree(
        chunk_size=chunk_size,
        rows=rows,
        lengths=lengths,
        parent=node_parent,
        entry_row=entry_row,
        level=_levels(node_parent, depth[ends] // chunk_size),
        owner=owner,
        owner_slot=depth % chunk_size,
    )


def _levels(parent: IntArray, chunk_index: IntArray) -> IntArray:
    """Number of nodes above each node; ``chunk_index`` grows by one from a node to its child."""
    level = np.zeros(len(parent), np.int64)
    if len(parent) == 0:
        return level
    order = np.argsort(chunk_index, kind="stable")
    bounds = np.searchsorted(chunk_index[order], np.arange(chunk_index.max() + 2))
    for start, stop in pairwise(bounds):
        nodes = order[start:stop]
        inner = nodes[parent[nodes] >= 0]
        level[inner] = level[parent[inner]] + 1
    return level
