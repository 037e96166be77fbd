"""Level 1: cuts the walks of ranks into pieces (NumPy only)."""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harts_hf.planner.chunks import whole_chunk_rows
from harts_hf.planner.cost import UnitSeconds, causal_pairs
from harts_hf.planner.walk import CutTable, Walk

# A cut moves back at most this many chunks to lie on a chunk boundary or below a leaf.
ALIGN_WITHIN_CHUNKS = 1


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The positions ``[start, stop)`` of a walk, and how many rows above are computed again (all or none)."""

    start: int
    stop: int
    again: int = 0

    @property
    def num_rows(self) -> int:
        """Network rows."""
        return self.stop - self.start + self.again


@dataclass(frozen=True, kw_only=True)
class PieceLimits:
    """What a piece may hold.

    Attributes:
        rows: network rows.
        linear_rows: rows of the linear layers, or None.
        recompute_below: a prefix of fewer rows than this is computed again instead of read from trunks.
        aligned: whether a cut moves back a little to lie on a chunk boundary or below a leaf.
        closing: whether no piece may tie subtrees together: a piece that finishes a subtree, whose upper part earlier
            pieces hold, ends before it leaves another one unfinished. Otherwise the earlier pieces' states and
            gradients would be alive until the other subtree is done, and so on: as many as the tree is wide.
    """

    rows: int
    linear_rows: int | None = None
    recompute_below: int = 0
    aligned: bool = True
    closing: bool = False


def cut_greedily(
    table: CutTable, limits: PieceLimits, *, chunk_size: int, seconds_per: UnitSeconds, seconds: float = np.inf
) -> list[Piece]:
    """The fewest pieces within ``limits`` whose rows take at most ``seconds`` each, front to back.

    A piece of one chunk is always allowed, however long it takes. Complexity: O(P log K) for P pieces of K cuts.
    """
    position, times, last = table.lists.position, table.lists.seconds, len(table.position) - 1
    pieces: list[Piece] = []
    at = 0
    holders = _Holders()
    while at < last:
        again = table.lists.above[at]
        if again >= limits.recompute_below or not _fits_again(again, limits, chunk_size):
            again = 0
        stop = bisect_right(position, position[at] + limits.rows - again, at) - 1
        if seconds < np.inf:
            budget = times[at] + seconds - prefix_seconds(again, seconds_per, chunk_size)
            stop = min(stop, bisect_right(times, budget, at) - 1)
        if limits.linear_rows is not None:
            room = int(table.linear[at]) + limits.linear_rows - whole_chunk_rows(again, chunk_size)
            stop = min(stop, bisect_right(table.lists.with_partial, room, at) - 1)
        stop = max(stop, at + 1)
        if limits.aligned:
            stop = aligned(table, at, stop, chunk_size)
        if limits.closing:
            stop = _closing(table.lists.above, at, stop, holders)
            holders.append(min(table.lists.above[at:stop]))
        pieces.append(Piece(start=position[at], stop=position[stop], again=again))
        at = stop
    return pieces


def _fits_again(again: int, limits: PieceLimits, chunk_size: int) -> bool:
    """Whether a chunk has room beside a prefix that is computed again."""
    linear_rows = whole_chunk_rows(again, chunk_size) + chunk_size
    return again + chunk_size <= limits.rows and (limits.linear_rows is None or linear_rows <= limits.linear_rows)


def aligned(table: CutTable, at: int, stop: int, chunk_size: int) -> int:
    """``stop`` or a cut shortly before it that leaves no chunk node unfinished."""
    partial, position = table.lists.partial, table.lists.position
    best = stop
    while partial[best] and best - 1 > at and position[stop] - position[best - 1] <= ALIGN_WITHIN_CHUNKS * chunk_size:
        best -= 1
    return stop if partial[best] else best


class _Holders:
    """Which of the pieces so far holds the open ancestor of a depth: the last one with a row of that depth or less."""

    def __init__(self) -> None:
        self._shallowest: list[int] = []  # ascending: pieces that a later one hides are left out

    def append(self, shallowest: int) -> None:
        """The next piece, by the depth of its shallowest row."""
        while self._shallowest and self._shallowest[-1] >= shallowest:
            self._shallowest.pop()
        self._shallowest.append(shallowest)

    def shallowest_beside(self, depth: int) -> int:
        """The least depth that the same piece holds as ``depth``; a negative one where no piece holds that."""
        index = bisect_right(self._shallowest, depth) - 1
        return self._shallowest[index] if index >= 0 else -1


def _closing(above: list[int], at: int, stop: int, holders: _Holders) -> int:
    """``stop``, or the last cut before it at which the piece ties no finished subtree to an unfinished one.

    Rows at depths from the least in the piece up to its first row's are finished. They tie if other pieces hold the
    open row above them than hold that above the first row; a cut at the least depth leaves nothing unfinished.
    """
    beside = holders.shallowest_beside(above[at] - 1)
    if beside < 0 or min(above[at:stop]) > beside:
        return stop
    within = above[at : stop + 1]
    return stop - within[::-1].index(min(within))


def prefix_seconds(rows: int, seconds_per: UnitSeconds, chunk_size: int) -> float:
    """Time of computing a path of ``rows`` from its root, its last chunk where that is whole."""
    linear = whole_chunk_rows(rows, chunk_size)
    return seconds_per.rows * rows + seconds_per.linear_rows * linear + seconds_per.pairs * causal_pairs(rows)


def cut_evenly(
    tables: Sequence[CutTable], limits: PieceLimits, count: int, *, chunk_size: int, seconds_per: UnitSeconds
) -> list[list[Piece]] | None:
    """At most ``count`` pieces per rank, the slowest piece as fast as the limits allow; None if ``count`` is too few.

    Ranks move in lockstep, so equal pieces on all of them lose nothing. Complexity: a greedy cut of each rank, and a
    few more of each rank whose slowest piece is slower than those of the ranks before it.
    """

    def cut(table: CutTable, seconds: float) -> list[Piece]:
        return cut_greedily(table, limits, chunk_size=chunk_size, seconds_per=seconds_per, seconds=seconds)

    totals = [float(table.seconds[-1]) for table in tables]
    slowest = max(totals) / max(count, 1)
    found: list[list[Piece]] = [[] for _ in tables]
    for rank in sorted(range(len(tables)), key=lambda rank: -totals[rank]):
        pieces = cut(tables[rank], slowest)
        if len(pieces) > count:
            if len(cut(tables[rank], np.inf)) > count:
                return None
            low = high = slowest
            step_up = 0.02
            while (
                len(pieces) > count
            ):  # where seconds, not rows, bind, the bound is nearly met: look close to it first
                low, high, step_up = high, high * (1 + step_up), 2 * step_up
                pieces = cut(tables[rank], high)
            while high - low > 2e-3 * high:
                middle = (low + high) / 2
                fewer = cut(tables[rank], middle)
                if len(fewer) > count:
                    low = middle
                else:
                    high, pieces = middle, fewer
            slowest = high
        found[rank] = pieces
    return found


def cut_whole_paths(walk: Walk, table: CutTable, limits: PieceLimits, *, chunk_size: int) -> list[Piece]:
    """Pieces of whole paths, every prefix computed again: the fewest network rows over runs of leaves.

    A leaf whose path alone exceeds a limit makes a piece of its own. Complexity: O(S log K).
    """
    leaves = np.flatnonzero(walk.is_leaf)
    if len(leaves) == 0:
        return []
    stops = walk.position[leaves + 1]
    starts = np.append(0, stops[:-1])
    above = walk.depth[np.append(0, leaves[:-1] + 1)]
    linear = np.append(0, table.linear[np.searchsorted(table.position, stops)])  # a walk is cut below every leaf
    runs = _best_runs(
        (starts - above).tolist(),
        stops.tolist(),
        (linear[:-1] - whole_chunk_rows(above, chunk_size)).tolist(),
        linear[1:].tolist(),
        above.tolist(),
        limits,
    )
    return [Piece(start=int(starts[i]), stop=int(stops[j]), again=int(above[i])) for i, j in runs]


def _best_runs(
    starts: list[int],
    stops: list[int],
    linear_starts: list[int],
    linear_stops: list[int],
    again: list[int],
    limits: PieceLimits,
) -> list[tuple[int, int]]:
    """Splits leaves into runs ``(first, last)`` within limits, the sum of ``again[first]`` the smallest.

    A run has ``stops[last] - starts[first]`` network rows, and linear rows likewise.
    """
    max_linear = 2**62 if limits.linear_rows is None else limits.linear_rows

    def too_long(first: int, last: int) -> bool:
        return stops[last] - starts[first] > limits.rows or linear_stops[last] - linear_starts[first] > max_linear

    best: list[int] = []  # best[j]: the smallest sum over the leaves 0..j
    cut: list[int] = []
    candidates: deque[tuple[int, int]] = deque()  # (first leaf, its sum), ascending in both
    for last in range(len(stops)):
        total = (best[last - 1] if last else 0) + again[last]
        while candidates and candidates[-1][1] > total:
            candidates.pop()
        candidates.append((last, total))
        # A run shortens as its first leaf moves on, so runs that are too long stand at the front.
        while len(candidates) > 1 and too_long(candidates[0][0], last):
            candidates.popleft()
        first, total = candidates[0]
        best.append(total)
        cut.append(first)
    runs = []
    last = len(stops) - 1
    while last >= 0:
        runs.append((cut[last], last))
        last = cut[last] - 1
    return runs[::-1]
