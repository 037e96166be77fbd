"""Level 2, placement: which rank computes which leaves (NumPy only).

Activations never travel between ranks, so a rank computes the whole paths of its leaves; a prefix that two ranks need
is computed on both. The leaves stand in an order in which the deepest child comes last; a run of leaves then costs the
rows between its ends plus the path above its first leaf, which is short where the run is the early part of a spine.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harts_hf.planner.chunks import whole_chunk_rows
from harts_hf.planner.cost import UnitSeconds, causal_pairs
from harts_hf.planner.cuts import prefix_seconds
from harts_hf.planner.walk import FloatArray, Walk
from harts_hf.tree import IntArray


@dataclass(frozen=True, eq=False, kw_only=True)
class LeafTable:
    """Costs of runs of leaves of a walk with ``L`` leaves.

    Attributes:
        before: ``[L + 1]`` estimated seconds of all rows of the walk before each leaf's own first row.
        above: ``[L]`` estimated seconds of the path above each leaf's own first row.
        root: ``[L]`` number of each leaf's root.
    """

    before: FloatArray
    above: FloatArray
    root: IntArray

    @property
    def num_leaves(self) -> int:
        """L."""
        return len(self.root)

    @classmethod
    def build(cls, walk: Walk, *, chunk_size: int, seconds_per: UnitSeconds) -> "LeafTable":
        """Of a walk; ``seconds_per`` is of a whole step."""
        leaves = np.flatnonzero(walk.is_leaf)
        first = np.append(0, leaves[:-1] + 1)  # the segment after the leaf before
        stop = walk.depth + walk.length
        pairs = causal_pairs(stop) - causal_pairs(walk.depth)
        nodes = whole_chunk_rows(stop, chunk_size) - whole_chunk_rows(walk.depth, chunk_size)
        nodes = nodes + np.where(walk.is_leaf, stop % chunk_size, 0)
        seconds = seconds_per.rows * walk.length + seconds_per.pairs * pairs + seconds_per.linear_rows * nodes
        before = np.append(0.0, np.cumsum(seconds))
        above = [prefix_seconds(depth, seconds_per, chunk_size) for depth in walk.depth[first].tolist()]
        return cls(before=before[np.append(first, walk.num_segments)], above=np.array(above), root=walk.root[first])

    def run(self, start: int, stop: int) -> float:
        """Seconds of the leaves ``[start, stop)`` alone on a rank."""
        return float(self.before[stop] - self.before[start] + self.above[start])

    def last_start(self, start: int, stop: int, seconds: float) -> int:
        """The lowest first leaf of a run up to ``stop`` within ``seconds``; ``stop`` if not even one leaf fits."""
        costs = self.before[stop] - self.before[start:stop] + self.above[start:stop]
        fits = np.flatnonzero(costs <= seconds)  # costs fall: each leaf's path lies within the run before it
        return start + int(fits[0]) if fits.size else stop

    def first_stop(self, start: int, stop: int, seconds: float) -> int:
        """The end of the longest run from ``start`` within ``seconds``."""
        budget = seconds - self.above[start] + self.before[start]
        return min(stop, int(np.searchsorted(self.before, budget * (1 + 1e-12), side="right")) - 1)


Run = tuple[int, int]


def place_runs(leaves: LeafTable, world_size: int, slacks: Sequence[float]) -> list[IntArray]:
    """Ranks of the leaves, ``[L]``, several answers from the fastest to the one that repeats least.

    Searches the smallest time within which :func:`_pack` succeeds, then packs within ``1 + slack`` of it, and with
    the least slack that repeats about as little as the last.
    Complexity: O(log) packings.
    """
    starts = np.flatnonzero(np.append(True, leaves.root[1:] != leaves.root[:-1]))
    roots = list(zip(starts.tolist(), np.append(starts[1:], leaves.num_leaves).tolist(), strict=True))
    path = leaves.above + np.diff(leaves.before)
    low = max(float(leaves.before[-1]) / world_size, float(path.max()))
    high = low
    while (best := _pack(leaves, roots, world_size, high)) is None:
        low, high = high, high * 1.05
    while high - low > 2e-3 * high:
        middle = (low + high) / 2
        found = _pack(leaves, roots, world_size, middle)
        if found is None:
            low = middle
        else:
            high, best = middle, found
    packings = [best]
    for slack in slacks:
        packings.append(_pack(leaves, roots, world_size, high * (1 + slack)) or best)
    packings.append(_least_slack(leaves, roots, world_size, high, high * (1 + slacks[-1])) or best)
    return [_owner_of_leaves(ranks, leaves.num_leaves) for ranks in packings]


def _least_slack(
    leaves: LeafTable, roots: list[Run], world_size: int, low: float, high: float
) -> list[list[Run]] | None:
    """The packing of the least time that repeats about as little as the one within ``high``."""

    def total(ranks: list[list[Run]]) -> float:
        return sum(leaves.run(*run) for runs in ranks for run in runs)

    best = _pack(leaves, roots, world_size, high)
    if best is None:
        return None
    enough = total(best) * 1.003
    while high - low > 2e-3 * high:
        middle = (low + high) / 2
        found = _pack(leaves, roots, world_size, middle)
        if found is not None and total(found) <= enough:
            high, best = middle, found
        else:
            low = middle
    return best


def _owner_of_leaves(ranks: list[list[Run]], num_leaves: int) -> IntArray:
    owner = np.empty(num_leaves, np.int64)
    for rank, runs in enumerate(ranks):
        for start, stop in runs:
            owner[start:stop] = rank
    return owner


def _pack(leaves: LeafTable, roots: list[Run], world_size: int, seconds: float) -> list[list[Run]] | None:
    """Runs on ranks within ``seconds`` each, or None.

    Trees that are too long for a rank are cut from their deep end. The largest run then goes to a rank that has room
    (the emptiest, or if that fails the fullest such rank); if none has, the early part of it fills the emptiest one.
    """
    queue = []
    for start, stop in roots:
        while leaves.run(start, stop) > seconds:
            cut = leaves.last_start(start, stop, seconds)
            if cut == stop:
                return None
            queue.append((cut, stop))
            stop = cut
        queue.append((start, stop))
    queue.sort(key=lambda run: (-leaves.run(*run), run))
    for fullest in (False, True):
        found = _fill(leaves, list(queue), world_size, seconds, fullest)
        if found is not None:
            return found
    return None


def _fill(
    leaves: LeafTable, queue: list[Run], world_size: int, seconds: float, fullest: bool
) -> list[list[Run]] | None:
    rooms = [(seconds, rank) for rank in range(world_size)]  # (room, rank), ascending
    ranks: list[list[Run]] = [[] for _ in range(world_size)]
    needs = [-leaves.run(*run) for run in queue]
    head = 0
    while head < len(queue):
        start, stop = queue[head]
        need = -needs[head]
        head += 1
        fitting = bisect_left(rooms, (need - 1e-12 * seconds, -1))
        emptiest = bisect_left(rooms, (rooms[-1][0], -1))  # the lowest rank of those with most room
        if fitting < world_size:
            room, rank = rooms.pop(fitting if fullest else emptiest)
            cut = stop
        else:
            room, rank = rooms.pop(emptiest)
            cut = leaves.first_stop(start, stop, room)
            if cut <= start:
                return None
            rest = leaves.run(cut, stop)
            index = bisect_right(needs, -rest, head)
            queue.insert(index, (cut, stop))
            needs.insert(index, -rest)
        insort(rooms, (room - leaves.run(start, cut), rank))
        ranks[rank].append((start, cut))
    return ranks


def walks_of_owners(walk: Walk, order: Walk, owner: IntArray, world_size: int) -> list[Walk]:
    """The walk of each rank over the paths of its leaves; the first rank that computes a segment owns it.

    Args:
        walk: the walk whose leaves ``owner`` is for.
        order: a walk over the same segments, in the order in which the ranks are to go.
        owner: ``[L]`` rank of each leaf.
        world_size: ranks.
    """
    by_row = np.argsort(walk.row)
    rank = np.full(walk.num_segments, -1)
    rank[walk.is_leaf] = owner
    rank_of_segment = rank[by_row[np.searchsorted(walk.row, order.row, sorter=by_row)]]
    taken = np.zeros(order.num_segments, bool)
    walks = []
    for number in range(world_size):
        part = order.select(rank_of_segment == number, ~taken)
        walks.append(part)
        taken |= np.isin(order.row, part.row, assume_unique=True)
    return walks
