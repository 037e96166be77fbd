"""Exact counts of what microbatches compute, read and hand over (NumPy only)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

import numpy as np

from harts_hf.planner.chunks import SegmentChunks
from harts_hf.planner.cost import CostModel, Work, causal_pairs
from harts_hf.planner.linear_calls import calls_of_forests
from harts_hf.planner.microbatch import Microbatch
from harts_hf.planner.spans import NO_SPANS, contains, expand_ranges, intersect, sorted_unique, union
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
        length = np.diff(np.append(starts, tree.num_tokens))
        pairs = causal_pairs(self._depth + length) - causal_pairs(self._depth)
        self._pairs = np.append(0, np.cumsum(pairs))
        leaf = np.ones(len(starts), bool)
        leaf[self._segment_parent[self._segment_parent >= 0]] = False
        ends = SegmentChunks.of(self._depth, length, chunk_size)
        # A chunk that a segment with children leaves unfinished ends further down, in each of them.
        finished = (ends.rows == chunk_size) | leaf[ends.segment]
        segment = ends.segment[finished]
        self.row = starts[segment] + ends.stop[finished] - self._depth[segment] - 1
        self.rows = ends.rows[finished]
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
        return self._pairs[segment] + causal_pairs(depth) - causal_pairs(self._depth[segment])

    def chunk_nodes(self, spans: IntArray, part: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Chunk nodes of the rows in spans, in several parts that do not know of one another.

        Args:
            spans: ``[k, 2]`` half-open spans of rows; those of a part stand together and ascend.
            part: ``[k]`` the part of each span, ascending.

        Returns:
            For each node, in the order of parts and last rows: its part, its last row, its number of rows (handed
            rows included) and the row before its first one (-1 for none).
        """
        which, inside = expand_ranges(np.searchsorted(self.row, spans[:, 0]), np.searchsorted(self.row, spans[:, 1]))
        # A row in the middle of a span has a child there or is a leaf, so only last rows can be left unfinished.
        last = spans[:, 1] - 1
        unfinished = (self.tree.subtree_end[last] > last + 1) & ((self.tree.depth[last] + 1) % self.chunk_size != 0)
        stride = self.tree.num_tokens + 1
        ended = np.flatnonzero(unfinished)
        above_spans = np.sort(part * stride + self.tree.parent[spans[:, 0]])  # rows that go on in a span of their part
        number = part[ended] * stride + last[ended]
        found = np.minimum(np.searchsorted(above_spans, number), len(above_spans) - 1)
        ended = ended[above_spans[found] != number]
        in_part, row, rows, above = part[which], self.row[inside], self.rows[inside], self.above[inside]
        if len(ended) == 0:
            return in_part, row, rows, above
        last = last[ended]
        in_part, row = np.concatenate([in_part, part[ended]]), np.concatenate([row, last])
        order = np.argsort(in_part * stride + row, kind="stable")
        rows = np.concatenate([rows, self.tree.depth[last] % self.chunk_size + 1])
        above = np.concatenate([above, self.rows_above(last)])
        return in_part[order], row[order], rows[order], above[order]


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


def measure_all(ends: ChunkEnds, microbatches: Sequence[Microbatch], cost: CostModel) -> tuple[Measure, ...]:
    """Counts of microbatches, in their order.

    Complexity: NumPy work over chunk nodes and spans, one Python step per microbatch and branch of chunk nodes.
    """
    count = len(microbatches)
    spans = np.concatenate([microbatch.row_spans for microbatch in microbatches])
    num_spans = np.array([len(microbatch.row_spans) for microbatch in microbatches])
    part = np.repeat(np.arange(count), num_spans)
    node_part, row, rows, above = ends.chunk_nodes(spans, part)
    # Row r of part p has the number p * stride + r, so that all parts are searched at once.
    stride = ends.tree.num_tokens + 1
    above_number = node_part * stride + above
    here = (above >= 0) & contains(spans + (part * stride)[:, None], above_number)
    parent = np.where(here, np.searchsorted(node_part * stride + row, above_number), -1)
    entries = sorted_unique(above_number[~here & (above >= 0)])
    entry_ends = np.searchsorted(entries, np.arange(1, count) * stride)
    node_ends = np.searchsorted(node_part, np.arange(count + 1))
    linear_rows = np.diff(np.append(0, np.cumsum(rows))[node_ends]).tolist()
    span_pairs = ends.pairs_before(spans[:, 1]) - ends.pairs_before(spans[:, 0])
    pairs = np.diff(np.append(0, np.cumsum(span_pairs))[np.append(0, np.cumsum(num_spans))]).tolist()
    calls = calls_of_forests(parent, node_part, count).tolist()
    chunks = np.diff(node_ends).tolist()
    entries_of = np.split(entries % stride, entry_ends)
    return tuple(
        Measure(
            work=Work(
                rows=microbatch.num_rows,
                linear_rows=linear_rows[i],
                pairs=pairs[i],
                calls=calls[i],
                handoff_bytes=microbatch.num_prefix * cost.handoff_bytes_per_row
                + len(entries_of[i]) * cost.handoff_bytes_per_state,
            ),
            entries=entries_of[i],
            chunks=chunks[i],
        )
        for i, microbatch in enumerate(microbatches)
    )


def measure(ends: ChunkEnds, microbatch: Microbatch, cost: CostModel) -> Measure:
    """Counts of one microbatch."""
    return measure_all(ends, [microbatch], cost)[0]


@dataclass(frozen=True, kw_only=True)
class Handed:
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


@dataclass(frozen=True, eq=False, kw_only=True)
class Accounts:
    """Counts of all microbatches of a plan.

    Attributes:
        microbatches: by id.
        measures: what each microbatch does, by id.
        num_rows: rows of the forest.
        cost: for bytes of what is handed over.
    """

    microbatches: Sequence[Microbatch]
    measures: tuple[Measure, ...]
    num_rows: int
    cost: CostModel

    @classmethod
    def of(cls, ends: ChunkEnds, microbatches: Sequence[Microbatch], cost: CostModel) -> "Accounts":
        """Of microbatches by id. Complexity: see :func:`measure_all`."""
        measures = measure_all(ends, microbatches, cost)
        return cls(microbatches=microbatches, measures=measures, num_rows=ends.tree.num_tokens, cost=cost)

    @cached_property
    def handed(self) -> dict[int, Handed]:
        """What each trunk hands over, by id; microbatches that nobody reads are left out.

        Counted on first use, since planning needs it under a limit of handed bytes only. Complexity: NumPy work over
        the spans of all prefixes.
        """
        return _handed(self.num_rows, self.microbatches, self.measures, self.cost)


# Handed spans are united once this many have come together.
_UNITE_AT = 2**16


def _handed(
    num_rows: int, microbatches: Sequence[Microbatch], measures: Sequence[Measure], cost: CostModel
) -> dict[int, Handed]:
    # Trunk t's row r has the number t * stride + r, so that the spans of all trunks are united at once, none touching
    # those of the next trunk.
    stride = num_rows + 1
    spans, waiting, num_waiting = NO_SPANS, [], 0
    states = []
    for microbatch, measured in zip(microbatches, measures, strict=True):
        if not microbatch.trunks:
            continue
        trunk, read = spans_by_trunk(microbatch, microbatches)
        waiting.append(read + (trunk * stride)[:, None])
        num_waiting += len(read)
        if num_waiting > _UNITE_AT + 2 * len(spans):
            spans, waiting, num_waiting = union([spans, *waiting]), [], 0
        order = np.argsort(read[:, 0], kind="stable")
        holder = trunk[order[np.searchsorted(read[order, 0], measured.entries, side="right") - 1]]
        states.append(holder * stride + measured.entries)
    if not states:
        return {}
    spans = union([spans, *waiting])
    trunks = np.flatnonzero(np.bincount(np.concatenate([microbatch.trunk_ids for microbatch in microbatches])))
    rows_of = np.bincount(spans[:, 0] // stride, weights=spans[:, 1] - spans[:, 0], minlength=len(microbatches))
    states_of = np.bincount(sorted_unique(np.concatenate(states)) // stride, minlength=len(microbatches))
    return {trunk: _handed_of(int(rows_of[trunk]), int(states_of[trunk]), cost) for trunk in trunks.tolist()}


def _handed_of(rows: int, states: int, cost: CostModel) -> Handed:
    of_rows, of_states = rows * cost.handoff_bytes_per_row, states * cost.handoff_bytes_per_state
    gradients = of_rows * cost.gradient_part_of_row + of_states * cost.gradient_part_of_state
    return Handed(
        rows=rows, states=states, value_bytes=ceil(of_rows + of_states - gradients), gradient_bytes=ceil(gradients)
    )


def spans_by_trunk(microbatch: Microbatch, microbatches: Sequence[Microbatch]) -> tuple[IntArray, IntArray]:
    """Spans of a microbatch's prefix, each within one trunk: the trunks' ids ``[k]`` and the spans ``[k, 2]``."""
    held = [microbatches[trunk].row_spans for trunk in microbatch.trunks]
    which, spans = intersect(np.concatenate(held), microbatch.prefix_spans)
    return np.repeat(microbatch.trunk_ids, list(map(len, held)))[which], spans
