"""What runs of leaves cost, for placement (NumPy only)."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from harts_hf.planner.chunks import whole_chunk_rows
from harts_hf.planner.cost import UnitSeconds, causal_pairs
from harts_hf.planner.walk import FloatArray, Walk
from harts_hf.tree import IntArray

# The first leaf of a run and the one after its last.
Run = tuple[int, int]
# A path above units, the common rows aside, takes at most this part of a step that cannot be faster.
SPLIT_WITHIN = 1e-3


@dataclass(frozen=True, eq=False, kw_only=True)
class LeafTable:
    """Costs of runs of leaves of a walk with ``L`` leaves.

    Ranks move in lockstep and a forward waits for forwards only, so the slowest rank's forwards and the slowest rank's
    backwards add up, and every rank waits for as many microbatches as the rank with most rows needs. Costs are
    therefore kept apart in the rows of the arrays: 0 the forwards, 1 the backward, 2 network rows, each divided by
    what of it a second of the step has room for. What a run takes is the largest of the three.

    Attributes:
        before: ``[3, L + 1]`` costs of all rows of the walk before each leaf's own first row.
        above: ``[3, L]`` costs of the path above each leaf's own first row.
        common: ``[3]`` costs of the rows above all leaves, which every rank pays once; in none of the above.
        root: ``[L]`` number of each leaf's root.
        unit: ``[L]`` number of each leaf's subtree of those that have next to nothing above them that is not common;
            ascending.
    """

    before: FloatArray
    above: FloatArray
    common: FloatArray
    root: IntArray
    unit: IntArray

    @property
    def num_leaves(self) -> int:
        """L."""
        return len(self.root)

    @classmethod
    def build(
        cls, walk: Walk, *, chunk_size: int, step_parts: tuple[UnitSeconds, UnitSeconds], world_size: int
    ) -> "LeafTable":
        """Of a walk: seconds of the forwards and of the backward of a step, by their coefficients, and rows."""
        leaves = np.flatnonzero(walk.is_leaf)
        first = np.append(0, leaves[:-1] + 1)  # the segment after the leaf before
        stop = walk.depth + walk.length
        pairs = causal_pairs(stop) - causal_pairs(walk.depth)
        nodes = whole_chunk_rows(stop, chunk_size) - whole_chunk_rows(walk.depth, chunk_size)
        nodes = nodes + np.where(walk.is_leaf, stop % chunk_size, 0)
        own = np.stack([walk.length, nodes, pairs]).astype(np.float64)
        costs = np.array([[unit.rows, unit.linear_rows, unit.pairs] for unit in step_parts] + [[1.0, 0.0, 0.0]])

        def path(depth: IntArray) -> FloatArray:
            counts = np.stack([depth, whole_chunk_rows(depth, chunk_size), causal_pairs(depth)])
            return costs @ counts.astype(np.float64)

        common = path(stop[:1])[:, 0] if walk.parent[1:].min(initial=0) >= 0 and not walk.is_leaf[0] else np.zeros(3)
        before = np.append(np.zeros((3, 1)), np.cumsum(costs @ own, axis=1), axis=1)[:, np.append(first, len(stop))]
        before[:, 1:] -= common[:, None]
        above = path(walk.depth[first])
        above[:, 1:] -= common[:, None]
        # Segments that end where a path has taken next to no time are above units, those below them begin one.
        seconds = max(float(before[:2, -1].sum()) / world_size, float((above + np.diff(before))[:2].sum(axis=0).max()))
        is_top = ~walk.is_leaf & (path(stop)[:2].sum(axis=0) <= common[:2].sum() + SPLIT_WITHIN * seconds)
        begins = ~is_top & ((walk.parent < 0) | is_top[walk.parent])
        unit = (np.cumsum(begins) - 1)[leaves]
        return cls(before=before, above=above, common=common, root=walk.root[first], unit=unit)

    def divided(self, room: FloatArray) -> "LeafTable":
        """With costs divided by the room ``[3]`` that a second of the step has for each."""
        per = room[:, None]
        return replace(self, before=self.before / per, above=self.above / per, common=self.common / room)

    @cached_property
    def paths(self) -> FloatArray:
        """``[3, L]`` of the whole path of each leaf."""
        return self.above + np.diff(self.before)

    @cached_property
    def roots(self) -> list[Run]:
        """The run of leaves of each root."""
        return _runs_of_equal(self.root)

    @cached_property
    def units(self) -> list[Run]:
        """The run of leaves of each unit."""
        return _runs_of_equal(self.unit)

    @cached_property
    def unit_seconds(self) -> list[float]:
        """What :meth:`run` says of each unit."""
        start, stop = np.array(self.units).T
        costs = self.before[:, stop] - self.before[:, start] + self.above[:, start]
        return costs.max(axis=0).tolist()

    @cached_property
    def _lists(self) -> list[tuple[list[float], list[float]]]:
        return [(before.tolist(), above.tolist()) for before, above in zip(self.before, self.above, strict=True)]

    def run(self, start: int, stop: int) -> float:
        """Seconds of the leaves ``[start, stop)`` alone on a rank."""
        return max([before[stop] - before[start] + above[start] for before, above in self._lists])

    def sums(self, packing: Sequence[Sequence[Run]], cost: int) -> list[float]:
        """What each rank of a packing has of one of the costs, the common rows aside."""
        before, above = self._lists[cost]
        return [sum(before[stop] - before[start] + above[start] for start, stop in runs) for runs in packing]

    def last_start(self, start: int, stop: int, seconds: float) -> int:
        """The lowest first leaf of a run up to ``stop`` within ``seconds``; ``stop`` if not even one leaf fits."""
        costs = (self.before[:, stop, None] - self.before[:, start:stop] + self.above[:, start:stop]).max(axis=0)
        fits = np.flatnonzero(costs <= seconds)  # costs fall: each leaf's path lies within the run before it
        return start + int(fits[0]) if fits.size else stop

    def first_stop(self, start: int, stop: int, seconds: float) -> int:
        """The end of the longest run from ``start`` within ``seconds``."""
        for before, above in self._lists:
            budget = seconds - above[start] + before[start]
            stop = min(stop, bisect_right(before, budget * (1 + 1e-12)) - 1)
        return stop


def _runs_of_equal(numbers: IntArray) -> list[Run]:
    starts = np.flatnonzero(np.append(True, numbers[1:] != numbers[:-1]))
    return list(zip(starts.tolist(), np.append(starts[1:], len(numbers)).tolist(), strict=True))
