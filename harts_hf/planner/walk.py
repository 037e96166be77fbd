"""The segments of a forest in the order in which a rank walks them, and where the walk can be cut."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from harts_hf.planner.chunks import SegmentChunks
from harts_hf.planner.cost import UnitSeconds, causal_pairs
from harts_hf.tree import IntArray, RolloutTree

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False, kw_only=True)
class Walk:
    """Segments in a depth-first order, closed under parents.

    *Positions* ``0..num_rows`` number the rows in the order of the walk; a position is also the cut before its row.

    Attributes:
        row: ``[S]`` first row of each segment in the tree.
        length: ``[S]`` rows of each segment, at least 1.
        depth: ``[S]`` depth of its first row.
        parent: ``[S]`` the segment above, before it in the order; -1 at a root.
        owned: ``[S]`` bool, whether this walk owns the segment's rows.
    """

    row: IntArray
    length: IntArray
    depth: IntArray
    parent: IntArray
    owned: NDArray[np.bool_]

    @classmethod
    def of_tree(cls, tree: RolloutTree) -> "Walk":
        """All segments of a tree in preorder."""
        starts = tree.segment_starts
        return cls(
            row=starts,
            length=np.diff(np.append(starts, tree.num_tokens)),
            depth=tree.depth[starts],
            parent=tree.segment_parent,
            owned=np.ones(len(starts), bool),
        )

    @property
    def num_segments(self) -> int:
        """S."""
        return len(self.row)

    @property
    def num_rows(self) -> int:
        """Rows of the walk."""
        return int(self.position[-1])

    @cached_property
    def position(self) -> IntArray:
        """``[S + 1]`` position of each segment's first row, and the number of rows."""
        return np.concatenate([[0], np.cumsum(self.length)])

    @cached_property
    def is_leaf(self) -> NDArray[np.bool_]:
        """``[S]`` whether nothing hangs below a segment."""
        leaf = np.ones(self.num_segments, bool)
        leaf[self.parent[self.parent >= 0]] = False
        return leaf

    @cached_property
    def height(self) -> IntArray:
        """``[S]`` depth of the deepest end at or below each segment."""
        height = (self.depth + self.length).tolist()
        parent = self.parent.tolist()
        for segment in range(self.num_segments - 1, -1, -1):
            above = parent[segment]
            if above >= 0 and height[above] < height[segment]:
                height[above] = height[segment]
        return np.asarray(height, np.int64)

    @cached_property
    def root(self) -> IntArray:
        """``[S]`` number of the root (from 0, in order) that each segment hangs under."""
        return np.cumsum(self.parent < 0) - 1

    def reordered(self, *, deepest: Literal["first", "last"]) -> "Walk":
        """The same segments with the child of the greatest height "first" or "last" among its siblings.

        The other children keep their order of height; roots keep their order.
        """
        height = self.height
        key = np.where(self.parent < 0, np.arange(self.num_segments), height if deepest == "last" else -height)
        return self.in_order(_depth_first(self.parent.tolist(), np.argsort(key, kind="stable").tolist()))

    def take(self, segments: IntArray, owned: NDArray[np.bool_]) -> "Walk":
        """Some segments, closed under parents, in the same order.

        Args:
            segments: ``[k]`` their numbers, ascending.
            owned: ``[S]`` bool, which segments the selection owns.
        """
        return self.in_order(segments, owned=owned)

    def in_order(self, order: IntArray, owned: NDArray[np.bool_] | None = None) -> "Walk":
        """Some segments, closed under parents, in an order of their own that is depth-first.

        Args:
            order: ``[k]`` their numbers.
            owned: ``[S]`` bool, which segments the selection owns; None for those that this walk does.
        """
        number = np.full(self.num_segments + 1, -1, np.int64)
        number[order] = np.arange(len(order))
        return Walk(
            row=self.row[order],
            length=self.length[order],
            depth=self.depth[order],
            parent=number[self.parent[order]],
            owned=(self.owned if owned is None else owned)[order],
        )

    @cached_property
    def level(self) -> IntArray:
        """``[S]`` number of segments above each segment."""
        level: list[int] = []
        for above in self.parent.tolist():
            level.append(level[above] + 1 if above >= 0 else 0)
        return np.array(level, np.int64)

    def segments_above(self, segments: IntArray) -> Iterator[IntArray]:
        """For ascending segments the ancestors of each, the outermost first.

        Complexity: NumPy work over the segments of the walk and of all answers.
        """
        path = np.zeros(int(self.level.max(initial=-1)) + 1, np.int64)  # the open segment of each level
        filled = 0
        for segment in segments.tolist():
            path[self.level[filled : segment + 1]] = np.arange(filled, segment + 1)
            filled = segment + 1
            yield path[: self.level[segment]].copy()

    def paths_above(self, starts: Sequence[int]) -> Iterator[IntArray]:
        """For ascending positions, those of the ancestors of the row at each.

        Yields:
            ``[k, 2]`` half-open runs of positions, each within one segment, the innermost last.

        Complexity: NumPy work over the segments of the walk and of all paths.
        """
        segments = np.searchsorted(self.position, starts, side="right") - 1
        for start, segment, above in zip(starts, segments.tolist(), self.segments_above(segments), strict=True):
            if self.position[segment] < start:
                above = np.append(above, segment)
            runs = np.stack([self.position[above], self.position[above] + self.length[above]], axis=1)
            if self.position[segment] < start:
                runs[-1, 1] = start
            yield runs


@dataclass(frozen=True, eq=False, kw_only=True)
class CutTable:
    """Where a walk can be cut: at chunk boundaries and at ends of segments. All arrays are ``[K]``.

    Attributes:
        position: ascending, from 0 to the number of rows.
        linear: rows of the chunk nodes that end before the cut.
        partial: rows of the one chunk node that the cut leaves unfinished (0 at a chunk boundary or below a leaf).
        pairs: attention pairs of the rows before the cut.
        above: number of ancestors of the row after the cut.
        seconds: estimated time of the rows before the cut, one step, without what is paid per microbatch.
    """

    position: IntArray
    linear: IntArray
    partial: IntArray
    pairs: IntArray
    above: IntArray
    seconds: FloatArray

    @cached_property
    def lists(self) -> "CutLists":
        """The arrays as lists, which are faster to bisect."""
        return CutLists(
            position=self.position.tolist(),
            partial=self.partial.tolist(),
            with_partial=(self.linear + self.partial).tolist(),
            above=self.above.tolist(),
            seconds=self.seconds.tolist(),
        )

    @classmethod
    def build(cls, walk: Walk, *, chunk_size: int, seconds_per: UnitSeconds) -> "CutTable":
        """Of a walk; ``seconds_per`` is of a whole step.

        Complexity: O(S + N / C).
        """
        ends = SegmentChunks.of(walk.depth, walk.length, chunk_size)
        segment = ends.segment
        finishes = (ends.rows == chunk_size) | walk.is_leaf[segment]
        position = walk.position[segment] + ends.stop - walk.depth[segment]
        linear = np.cumsum(np.where(finishes, ends.rows, 0))
        above_first = causal_pairs(walk.depth)
        pairs = causal_pairs(walk.depth + walk.length) - above_first
        pairs_before = (np.cumsum(pairs) - pairs - above_first)[segment] + causal_pairs(ends.stop)
        above = np.where(ends.is_last, np.append(walk.depth, 0)[segment + 1], ends.stop)
        seconds = seconds_per.rows * position + seconds_per.linear_rows * linear + seconds_per.pairs * pairs_before
        return cls(
            position=np.append(0, position),
            linear=np.append(0, linear),
            partial=np.append(0, np.where(finishes, 0, ends.rows)),
            pairs=np.append(0, pairs_before),
            above=np.append(0, above),
            seconds=np.append(0.0, seconds),
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class CutLists:
    """Columns of a :class:`CutTable`; ``with_partial`` is ``linear + partial``."""

    position: list[int]
    partial: list[int]
    with_partial: list[int]
    above: list[int]
    seconds: list[float]


def _depth_first(parent: list[int], by_key: list[int]) -> IntArray:
    """Preorder whose siblings stand as in ``by_key``."""
    children: list[list[int]] = [[] for _ in parent]
    roots: list[int] = []
    for segment in by_key:
        (children[parent[segment]] if parent[segment] >= 0 else roots).append(segment)
    order: list[int] = []
    stack = roots[::-1]
    while stack:
        segment = stack.pop()
        order.append(segment)
        stack.extend(reversed(children[segment]))
    return np.array(order, np.int64)
