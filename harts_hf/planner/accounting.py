"""Exact counts of what microbatches compute, read and keep (NumPy only)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from harts_hf.planner.cost import CostModel, Work
from harts_hf.planner.linear_calls import decompose_chains
from harts_hf.planner.microbatch import Microbatch, span_size
from harts_hf.planner.traversal import merge_spans
from harts_hf.tree import IntArray, RolloutTree


class ChunkEnds:
    """Where the chunk nodes of a whole tree end, without their tables of rows.

    Attributes:
        row: ``[M]`` last row of each node, ascending.
        rows: ``[M]`` rows of each node.
        above: ``[M]`` the row before the node's first one, -1 for none.
    """

    def __init__(self, tree: RolloutTree, chunk_size: int) -> None:
        self.tree, self.chunk_size = tree, chunk_size
        starts = tree.segment_starts
        self._starts = starts
        self._segment_parent = tree.segment_parent
        self._depth = tree.depth[starts]
        stop = self._depth + np.diff(np.append(starts, tree.num_tokens))
        pairs = stop * (stop + 1) // 2 - self._depth * (self._depth + 1) // 2
        self._pairs = np.append(0, np.cumsum(pairs))
        first = self._depth // chunk_size + 1
        aligned = stop // chunk_size - first + 1
        leaf = np.ones(len(starts), bool)
        leaf[self._segment_parent[self._segment_parent >= 0]] = False
        ragged = leaf & (stop % chunk_size != 0)
        count = aligned + ragged
        segment = np.repeat(np.arange(len(starts)), count)
        nth = np.arange(len(segment)) - np.repeat(np.cumsum(count) - count, count)
        depth_after = np.where(
            ragged[segment] & (nth == count[segment] - 1), stop[segment], (first[segment] + nth) * chunk_size
        )
        self.row = starts[segment] + depth_after - self._depth[segment] - 1
        self.rows = (depth_after - 1) % chunk_size + 1
        self.above = self.rows_above(self.row)

    def rows_above(self, rows: IntArray) -> IntArray:
        """For the last rows of chunk nodes, the row before each node's first row; -1 at depth 0."""
        depth = self.tree.depth[rows]
        target = depth // self.chunk_size * self.chunk_size - 1
        segment = np.searchsorted(self._starts, rows, side="right") - 1
        climbing = np.flatnonzero((target >= 0) & (self._depth[segment] > target))
        while climbing.size:
            segment[climbing] = self._segment_parent[segment[climbing]]
            climbing = climbing[self._depth[segment[climbing]] > target[climbing]]
        return np.where(target < 0, -1, self._starts[segment] + target - self._depth[segment])

    def pairs_before(self, rows: IntArray) -> IntArray:
        """Attention pairs of all rows of the tree before each of ``rows`` (which may be N)."""
        segment = np.searchsorted(self._starts, rows, side="right") - 1
        depth = self._depth[segment] + rows - self._starts[segment]
        first = self._depth[segment]
        return self._pairs[segment] + (depth * (depth + 1) - first * (first + 1)) // 2

    def chunk_nodes(self, microbatch: Microbatch) -> tuple[IntArray, IntArray, IntArray]:
        """Chunk nodes of a microbatch.

        Returns:
            Their last rows, their numbers of rows (handed rows included), the rows before their first ones.
        """
        spans = microbatch.row_spans
        low, high = np.searchsorted(self.row, spans[:, 0]), np.searchsorted(self.row, spans[:, 1])
        inside = np.concatenate([np.arange(a, b) for a, b in zip(low.tolist(), high.tolist(), strict=True)])
        # A row in the middle of a span has a child there or is a leaf, so only last rows can be left unfinished.
        last = spans[:, 1] - 1
        unfinished = (self.tree.subtree_end[last] > last + 1) & ((self.tree.depth[last] + 1) % self.chunk_size != 0)
        last = last[unfinished]
        last = last[~np.isin(last, self.tree.parent[spans[:, 0]])]
        if len(last) == 0:
            return self.row[inside], self.rows[inside], self.above[inside]
        row = np.concatenate([self.row[inside], last])
        order = np.argsort(row, kind="stable")
        rows = np.concatenate([self.rows[inside], self.tree.depth[last] % self.chunk_size + 1])
        above = np.concatenate([self.above[inside], self.rows_above(last)])
        return row[order], rows[order], above[order]


@dataclass(frozen=True, eq=False, kw_only=True)
class Measure:
    """What one microbatch does.

    Attributes:
        work: for the cost model.
        entries: ``[E]`` rows of trunks after which boundary states are read, ascending.
        chunks: chunk nodes of its linear layers.
    """

    work: Work
    entries: IntArray
    chunks: int


def measure(ends: ChunkEnds, microbatch: Microbatch, cost: CostModel) -> Measure:
    """Counts of a microbatch. Complexity: O(chunk nodes + spans), one Python step a chunk node."""
    row, rows, above = ends.chunk_nodes(microbatch)
    here = contains(microbatch.row_spans, above)
    parent = np.where(here, np.searchsorted(row, above), -1)
    entries = np.unique(above[~here & (above >= 0)])
    pairs = ends.pairs_before(microbatch.row_spans[:, 1]) - ends.pairs_before(microbatch.row_spans[:, 0])
    handed = microbatch.num_prefix * cost.handoff_bytes_per_row + len(entries) * cost.handoff_bytes_per_state
    work = Work(
        rows=microbatch.num_rows,
        linear_rows=int(rows.sum()),
        pairs=int(pairs.sum()),
        calls=_calls(parent),
        handoff_bytes=handed,
    )
    return Measure(work=work, entries=entries, chunks=len(row))


def contains(spans: IntArray, rows: IntArray) -> NDArray[np.bool_]:
    """Which of ``rows`` lie in ascending half-open spans ``[k, 2]``."""
    if len(spans) == 0:
        return np.zeros(len(rows), bool)
    place = np.searchsorted(spans[:, 0], rows, side="right") - 1
    return (place >= 0) & (rows < spans[place, 1])


def _calls(parent: IntArray) -> int:
    # One chain, or several side by side, is the common case and needs no walk.
    inner = parent[parent >= 0]
    if len(np.unique(inner)) == len(inner):
        return 1
    return decompose_chains(parent).num_calls


@dataclass(frozen=True, kw_only=True)
class Export:
    """What a trunk hands over to all of its dependents together.

    Attributes:
        rows: handed rows of full attention.
        states: boundaries of the linear layers.
        value_bytes: of what the trunk's forward makes.
        gradient_bytes: of the sums that its dependents' backwards add to.
    """

    rows: int
    states: int
    value_bytes: int
    gradient_bytes: int


class Exports:
    """Handed rows and states of every trunk.

    Attributes:
        of: by microbatch id.
    """

    def __init__(self, microbatches: Sequence[Microbatch], measures: Sequence[Measure], cost: CostModel) -> None:
        spans: dict[int, list[IntArray]] = {}
        states: dict[int, set[int]] = {}
        for microbatch, measured in zip(microbatches, measures, strict=True):
            for trunk in microbatch.trunks:
                held = microbatches[trunk].row_spans
                spans.setdefault(trunk, []).append(intersect(microbatch.prefix_spans, held))
                inside = measured.entries[contains(held, measured.entries)]
                states.setdefault(trunk, set()).update(inside.tolist())
        self.of: dict[int, Export] = {}
        for trunk in sorted(spans):
            rows = span_size(union(spans[trunk]))
            count = len(states[trunk])
            of_rows, of_states = rows * cost.handoff_bytes_per_row, count * cost.handoff_bytes_per_state
            gradients = of_rows * cost.gradient_part_of_row + of_states * cost.gradient_part_of_state
            self.of[trunk] = Export(
                rows=rows,
                states=count,
                value_bytes=ceil(of_rows + of_states - gradients),
                gradient_bytes=ceil(gradients),
            )


def intersect(first: IntArray, second: IntArray) -> IntArray:
    """Common rows of two lists of ascending half-open spans."""
    low = np.searchsorted(second[:, 1], first[:, 0], side="right")
    high = np.searchsorted(second[:, 0], first[:, 1], side="left")
    count = np.maximum(high - low, 0)
    mine = np.repeat(np.arange(len(first)), count)
    nth = np.arange(len(mine)) - np.repeat(np.cumsum(count) - count, count)
    other = low[mine] + nth
    start = np.maximum(first[mine, 0], second[other, 0])
    stop = np.minimum(first[mine, 1], second[other, 1])
    return np.stack([start, stop], axis=1)


def union(spans: Sequence[IntArray]) -> IntArray:
    """All rows of several lists of half-open spans, as ascending disjoint spans."""
    together = np.concatenate(list(spans))
    if len(together) == 0:
        return together
    together = together[np.argsort(together[:, 0], kind="stable")]
    reach = np.maximum.accumulate(together[:, 1])
    fresh = np.append(True, together[1:, 0] > reach[:-1])
    stops = reach[np.append(np.flatnonzero(fresh)[1:] - 1, len(reach) - 1)]
    return merge_spans(np.stack([together[fresh, 0], stops], axis=1))
