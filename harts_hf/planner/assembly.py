"""Makes microbatches of the pieces of walks (NumPy only)."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from harts_hf.planner.cuts import Piece
from harts_hf.planner.microbatch import Microbatch
from harts_hf.planner.spans import NO_SPANS, expand_ranges, merge_spans, sorted_unique
from harts_hf.planner.walk import Walk
from harts_hf.tree import IntArray

# Runs of paths that are worked on at once, so that memory stays small where every piece has a path of many segments.
MAX_RUNS = 2**16


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
    piece, spans, owned = _own_spans(walk, starts, cuts[-1].stop)
    row_spans = _merged(piece, spans, count)
    owned_spans = row_spans if owned.all() else _merged(piece[owned], spans[owned], count)
    microbatches = []
    for first, paths in _batches(walk.paths_above(starts.tolist())):
        reader = np.repeat(np.arange(first, first + len(paths)), list(map(len, paths)))
        runs = np.concatenate([NO_SPANS, *paths])
        above = _merged(reader - first, _rows_of_runs(walk, runs), len(paths))
        trunks = _trunks(runs, reader, starts, repeats, first, len(paths))
        for index, prefix, own_trunks in zip(range(first, first + len(paths)), above, trunks, strict=True):
            again = repeats[index]
            rows = row_spans[index]
            microbatches.append(
                Microbatch.from_spans(
                    id=first_id + index,
                    row_spans=merge_spans(np.concatenate([rows, prefix])) if again else rows,
                    owned_spans=owned_spans[index],
                    prefix_spans=NO_SPANS if again else prefix,
                    trunks=() if again else tuple((first_id + own_trunks).tolist()),
                    rank=rank,
                )
            )
    return microbatches


def _batches(paths: Iterable[IntArray]) -> Iterator[tuple[int, list[IntArray]]]:
    """Paths in lists of about ``MAX_RUNS`` runs, each with the number of its first path."""
    first, batch, size = 0, [], 0
    for path in paths:
        batch.append(path)
        size += len(path)
        if size >= MAX_RUNS:
            yield first, batch
            first, batch, size = first + len(batch), [], 0
    if batch:
        yield first, batch


def _own_spans(walk: Walk, starts: IntArray, stop: int) -> tuple[IntArray, IntArray, NDArray[np.bool_]]:
    """Segments of a walk, cut where pieces begin: the piece of each part, its rows as a span, whether it is owned."""
    bounds = sorted_unique(np.concatenate([walk.position[:-1], starts]))
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


def _trunks(
    runs: IntArray, reader: IntArray, starts: IntArray, repeats: NDArray[np.bool_], first_reader: int, count: int
) -> list[IntArray]:
    """For ``count`` pieces from one on, those that hold their paths, up to the innermost that repeats its own prefix.

    Args:
        runs: ``[k, 2]`` runs of positions that are read, ascending for each reader.
        reader: ``[k]`` the piece that reads each, ascending.
        starts: ``[P]`` where pieces begin.
        repeats: ``[P]`` which pieces compute their prefix again.
        first_reader: the first of the pieces.
        count: how many.
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
    return np.split(holder, np.searchsorted(of, np.arange(first_reader + 1, first_reader + count)))
