"""Level 1 without handoff: microbatches of whole paths, a cut's prefix computed again (NumPy only)."""

from collections import deque

import numpy as np

from harts_hf.planner.schedule import Microbatch
from harts_hf.tree import IntArray, RolloutTree


def cut_with_recompute(tree: RolloutTree, *, max_rows: int) -> list[Microbatch]:
    """Cuts a forest into microbatches closed under ``parent``, with the fewest network rows over runs of leaves.

    A microbatch holds the paths of consecutive leaves. Its first leaf's path down to where the tree left the leaf
    before is a prefix computed again. A leaf whose path alone exceeds ``max_rows`` runs alone.

    Complexity: linear in rows and leaves.
    """
    leaves = np.flatnonzero(tree.num_children == 0)
    stops = leaves + 1
    starts = np.concatenate([[0], stops[:-1]])
    again = tree.depth[starts]
    firsts = _best_cuts(starts.tolist(), stops.tolist(), again.tolist(), max_rows)
    return [_microbatch(tree, index, int(starts[i]), int(stops[j])) for index, (i, j) in enumerate(firsts)]


def _best_cuts(starts: list[int], stops: list[int], again: list[int], max_rows: int) -> list[tuple[int, int]]:
    """Splits leaves into runs ``(first, last)`` of at most ``max_rows``, the sum of ``again[first]`` the smallest."""
    best: list[int] = []  # best[j]: the smallest sum over the leaves 0..j
    cut: list[int] = []
    candidates: deque[tuple[int, int]] = deque()  # (first leaf, its sum), ascending in both
    for last, stop in enumerate(stops):
        total = (best[last - 1] if last else 0) + again[last]
        while candidates and candidates[-1][1] > total:
            candidates.pop()
        candidates.append((last, total))
        # A run shortens as its first leaf moves on, so runs that are too long stand at the front.
        while len(candidates) > 1 and stop - starts[candidates[0][0]] + again[candidates[0][0]] > max_rows:
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


def _microbatch(tree: RolloutTree, index: int, start: int, stop: int) -> Microbatch:
    above = int(tree.parent[start])
    again: IntArray = tree.path_to(above) if above >= 0 else np.zeros(0, np.int64)
    rows = np.concatenate([again, np.arange(start, stop)])
    return Microbatch(id=index, rows=rows, owned=np.arange(len(rows)) >= len(again))
