"""The segments of a forest in the order in which a rank walks them, and the places where the walk can be cut."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from harts_hf.planner.cost import Coefficients
from harts_hf.tree import IntArray, RolloutTree

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False, kw_only=True)
class Traversal:
    """Segments in a depth-first order, closed under parents.

    *Places* ``0..num_rows`` number the rows in the order of the walk; a place is also the cut before its row.

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
    def of_tree(cls, tree: RolloutTree) -> "Traversal":
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
        return int(self.place[-1])

    @cached_property
    def place(self) -> IntArray:
        """``[S + 1]`` place of each segment's first row, and the number of rows."""
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

    def reordered(self, *, deepest: str) -> "Traversal":
        """The same segments with the child of the greatest height "first" or "last" among its siblings.

        The other children keep their order of height; roots keep their places.
        """
        height = self.height
        key = np.where(self.parent < 0, np.arange(self.num_segments), height if deepest == "last" else -height)
        return self._in_order(_depth_first(self.parent.tolist(), np.argsort(key, kind="stable").tolist()))

    def select(self, leaves: NDArray[np.bool_], owned: NDArray[np.bool_]) -> "Traversal":
        """The paths to some leaves, in the same order.

        Args:
            leaves: ``[S]`` bool, which leaf segments; other entries are not read.
            owned: ``[S]`` bool, which segments the selection owns.
        """
        keep = (leaves & self.is_leaf).tolist()
        parent = self.parent.tolist()
        for segment in range(self.num_segments - 1, -1, -1):
            if keep[segment] and parent[segment] >= 0:
                keep[parent[segment]] = True
        kept = np.flatnonzero(keep)
        return self._in_order(kept.tolist(), owned=owned)

    def _in_order(self, order: Sequence[int], owned: NDArray[np.bool_] | None = None) -> "Traversal":
        index = np.asarray(order, np.int64)
        number = np.full(self.num_segments + 1, -1, np.int64)
        number[index] = np.arange(len(index))
        return Traversal(
            row=self.row[index],
            length=self.length[index],
            depth=self.depth[index],
            parent=number[self.parent[index]],
            owned=(self.owned if owned is None else owned)[index],
        )

    def segment_of(self, place: int) -> int:
        """The segment that holds the row at ``place``."""
        return int(np.searchsorted(self.place, place, side="right")) - 1

    def spans(self, start: int, stop: int) -> IntArray:
        """``[k, 2]`` rows of the tree at the places ``[start, stop)`` as ascending half-open spans."""
        first, last = self.segment_of(start), self.segment_of(stop - 1)
        begin = self.row[first : last + 1].copy()
        end = begin + self.length[first : last + 1]
        begin[0] += start - self.place[first]
        end[-1] -= self.place[last + 1] - stop
        return merge_spans(np.stack([begin, end], axis=1))

    def owned_spans(self, start: int, stop: int) -> IntArray:
        """Like :meth:`spans`, the owned rows only."""
        if self.owned.all():
            return self.spans(start, stop)
        first, last = self.segment_of(start), self.segment_of(stop - 1)
        begin = self.row[first : last + 1].copy()
        end = begin + self.length[first : last + 1]
        begin[0] += start - self.place[first]
        end[-1] -= self.place[last + 1] - stop
        which = self.owned[first : last + 1]
        return merge_spans(np.stack([begin, end], axis=1)[which])

    def path_above(self, place: int) -> list[tuple[int, int]]:
        """Places of the ancestors of the row at ``place`` as half-open runs, the innermost first."""
        segment = self.segment_of(place)
        runs = []
        first = int(self.place[segment])
        if place > first:
            runs.append((first, place))
        above = int(self.parent[segment])
        while above >= 0:
            first = int(self.place[above])
            runs.append((first, first + int(self.length[above])))
            above = int(self.parent[above])
        return runs


@dataclass(frozen=True, eq=False, kw_only=True)
class CutTable:
    """Places where a walk can be cut: at chunk boundaries and at ends of segments. All arrays are ``[K]``.

    Attributes:
        place: ascending, from 0 to the number of rows.
        linear: rows of the chunk nodes that end before the cut.
        partial: rows of the one chunk node that the cut leaves unfinished (0 at a chunk boundary or below a leaf).
        pairs: attention pairs of the rows before the cut.
        above: number of ancestors of the row after the cut.
        seconds: estimated time of the rows before the cut, one step, without what is paid a microbatch.
    """

    place: IntArray
    linear: IntArray
    partial: IntArray
    pairs: IntArray
    above: IntArray
    seconds: FloatArray

    @cached_property
    def lists(self) -> "CutLists":
        """The arrays as lists, which are faster to bisect."""
        return CutLists(
            place=self.place.tolist(),
            partial=self.partial.tolist(),
            with_partial=(self.linear + self.partial).tolist(),
            above=self.above.tolist(),
            seconds=self.seconds.tolist(),
        )

    @classmethod
    def build(cls, walk: Traversal, *, chunk_size: int, step: Coefficients) -> "CutTable":
        """Of a walk, with the coefficients of a step.

        Complexity: O(S + N / C).
        """
        stop = walk.depth + walk.length
        first_chunk = walk.depth // chunk_size + 1
        aligned = stop // chunk_size - first_chunk + 1  # chunk ends inside each segment
        ragged = stop % chunk_size != 0
        count = aligned + ragged
        segment = np.repeat(np.arange(walk.num_segments), count)
        nth = np.arange(len(segment)) - np.repeat(np.cumsum(count) - count, count)
        at_end = nth == count[segment] - 1
        is_ragged = at_end & ragged[segment]
        depth = np.where(is_ragged, stop[segment], (first_chunk[segment] + nth) * chunk_size)
        finishes = ~is_ragged | walk.is_leaf[segment]
        node_rows = np.where(is_ragged, depth % chunk_size, chunk_size)
        pairs = _triangle(stop) - _triangle(walk.depth)
        place = walk.place[segment] + depth - walk.depth[segment]
        linear = np.cumsum(np.where(finishes, node_rows, 0))
        all_pairs = (np.cumsum(pairs) - pairs)[segment] + _triangle(depth) - _triangle(walk.depth)[segment]
        above = np.where(at_end, np.append(walk.depth, 0)[segment + 1], depth)
        seconds = step.rows * place + step.linear_rows * linear + step.pairs * all_pairs
        return cls(
            place=np.append(0, place),
            linear=np.append(0, linear),
            partial=np.append(0, np.where(finishes, 0, node_rows)),
            pairs=np.append(0, all_pairs),
            above=np.append(0, above),
            seconds=np.append(0.0, seconds),
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class CutLists:
    """Columns of a :class:`CutTable`; ``with_partial`` is ``linear + partial``."""

    place: list[int]
    partial: list[int]
    with_partial: list[int]
    above: list[int]
    seconds: list[float]


def merge_spans(spans: IntArray) -> IntArray:
    """Disjoint half-open spans ``[k, 2]`` in ascending order, neighbours that touch made one."""
    if len(spans) < 2:
        return spans
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    starts_new = np.append(True, spans[1:, 0] != spans[:-1, 1])
    return np.stack([spans[starts_new, 0], spans[np.append(starts_new[1:], True), 1]], axis=1)


def _triangle(depth: IntArray) -> IntArray:
    """Pairs of the rows of depths ``0..depth - 1``: a row of depth ``d`` sees ``d + 1`` keys."""
    return depth * (depth + 1) // 2


def _depth_first(parent: list[int], by_key: list[int]) -> list[int]:
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
    return order
