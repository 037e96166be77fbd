"""Makes microbatches of the pieces of walks (NumPy only)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from harts_hf.planner.cuts import Piece
from harts_hf.planner.microbatch import Microbatch
from harts_hf.planner.spans import NO_SPANS, expand_ranges
from harts_hf.planner.walk import Walk
from harts_hf.tree import IntArray


def assemble(walks: Sequence[Walk], pieces: Sequence[Sequence[Piece]]) -> list[Microbatch]:
    """Microbatches in the order of ranks and pieces.

    A piece that does not compute its prefix again reads it from the pieces before it that hold it; if one of those
    computed *its* prefix again, the rest is read from that one too, so that windows close early.

    Complexity: NumPy work over the segments of the walks and of the paths above pieces, a few calls per piece.
    """
    microbatches: list[Microbatch] = []
    for rank, (walk, cuts) in enumerate(zip(walks, pieces, strict=True)):
        if cuts:
            microbatches += _of_rank(walk, cuts, rank, len(microbatches))
    return microbatches


def _of_rank(walk: Walk, cuts: Sequence[Piece], rank: int, first_id: int) -> list[Microbatch]:
    count = len(cuts)
    starts = np.array([piece.start for piece in cuts])
    repeats = np.array([piece.again > 0 for piece in cuts])
    paths = list(walk.paths_above(starts.tolist()))
    reader = np.repeat(np.arange(count), list(map(len, paths)))
    runs = np.concatenate([NO_SPANS, *paths])
    above = _rows_of_runs(walk, runs)
    again = repeats[reader]

    piece, spans, owned = _own_spans(walk, starts, cuts[-1].stop)
    row_spans = _merged(np.append(piece, reader[again]), np.concatenate([spans, above[again]]), count)
    owned_spans = row_spans
    if not owned.all() or again.any():
        owned_spans = _merged(piece[owned], spans[owned], count)
    prefix_spans = _merged(reader[~again], above[~again], count)
    trunks = _trunks(runs[~again], reader[~again], starts, repeats)
    return [
        Microbatch.from_spans(
            id=first_id + index,
            row_spans=row_spans[index],
            owned_spans=owned_spans[index],
            prefix_spans=prefix_spans[index],
            trunks=tuple((first_id + trunks[index]).tolist()),
            rank=rank,
        )
        for index in range(count)
    ]


def _own_spans(walk: Walk, starts: IntArray, stop: int) -> tuple[IntArray, IntArray, NDArray[np.bool_]]:
    """Segments of a walk, cut where pieces begin: the piece of each part, its rows as a span, whether it is owned."""
    bounds = np.union1d(walk.position[:-1], starts)
    segment = np.searchsorted(walk.position, bounds, side="right") - 1
    begin = walk.row[segment] + bounds - walk.position[segment]
    spans = np.stack([begin, begin + np.diff(np.append(bounds, stop))], axis=1)
    return np.searchsorted(starts, bounds, side="right") - 1, spans, walk.owned[segment]


def _rows_of_runs(walk: Walk, runs: IntArray) -> IntArray:
    """Spans of rows at runs of positions, each within one segment."""
    segment = np.searchsorted(walk.position, runs[:, 0], side="right") - 1
    return runs + (walk.row[segment] - walk.position[segment])[:, None]


def _merged(part: IntArray, spans: IntArray, count: int) -> list[IntArray]:
    """Disjoint spans of each of ``count`` parts, ascending, neighbours that touch made one."""
    order = np.lexsort((spans[:, 0], part))
    part, spans = part[order], spans[order]
    touches = (spans[1:, 0] == spans[:-1, 1]) & (part[1:] == part[:-1])
    first, last = np.append(True, ~touches), np.append(~touches, True)
    if len(spans) == 0:
        return [NO_SPANS] * count
    merged = np.stack([spans[first, 0], spans[last, 1]], axis=1)
    return np.split(merged, np.searchsorted(part[first], np.arange(1, count)))


def _trunks(runs: IntArray, reader: IntArray, starts: IntArray, repeats: NDArray[np.bool_]) -> list[IntArray]:
    """For each piece, ascending, those that hold its path, up to the innermost that computes its own prefix again.

    Args:
        runs: ``[k, 2]`` runs of positions that are read, ascending for each reader.
        reader: ``[k]`` the piece that reads each, ascending.
        starts: ``[P]`` where pieces begin.
        repeats: ``[P]`` which pieces compute their prefix again.
    """
    first = np.searchsorted(starts, runs[:, 0], side="right") - 1
    last = np.searchsorted(starts, runs[:, 1] - 1, side="right") - 1
    # Runs ascend, and neighbours may end and begin in one piece.
    same = reader[1:] == reader[:-1]
    first[1:] = np.where(same, np.maximum(first[1:], last[:-1] + 1), first[1:])
    which, holder = expand_ranges(first, last + 1)
    of = reader[which]
    if repeats.any():
        innermost = np.full(len(starts), -1)
        np.maximum.at(innermost, of[repeats[holder]], holder[repeats[holder]])
        kept = holder >= innermost[of]
        of, holder = of[kept], holder[kept]
    return np.split(holder, np.searchsorted(of, np.arange(1, len(starts))))
