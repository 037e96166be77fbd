"""From pieces of the ranks' walks to microbatches and what they read from one another (NumPy only)."""

from collections.abc import Sequence

import numpy as np

from harts_hf.planner.cuts import Piece
from harts_hf.planner.microbatch import NO_SPANS, Microbatch
from harts_hf.planner.traversal import Traversal, merge_spans
from harts_hf.tree import IntArray


def assemble(walks: Sequence[Traversal], pieces: Sequence[Sequence[Piece]]) -> list[Microbatch]:
    """Microbatches in the order of ranks and pieces.

    A piece that does not compute its prefix again reads it from the pieces before it that hold it; if one of those
    computed *its* prefix again, the rest is read from that one too, so that windows close early.
    """
    microbatches: list[Microbatch] = []
    for rank, (walk, cuts) in enumerate(zip(walks, pieces, strict=True)):
        first_id = len(microbatches)
        starts = np.array([piece.start for piece in cuts], np.int64)
        for index, piece in enumerate(cuts):
            above = walk.path_above(piece.start)
            own = walk.spans(piece.start, piece.stop)
            prefix: IntArray = NO_SPANS
            trunks: tuple[int, ...] = ()
            if piece.again:
                own = merge_spans(np.concatenate([own, _rows_of_runs(walk, above)]))
            elif above:
                trunks = _providers(above, cuts, starts)
                prefix = _rows_of_runs(walk, above)
            microbatches.append(
                Microbatch.from_spans(
                    id=first_id + index,
                    row_spans=own,
                    owned_spans=walk.owned_spans(piece.start, piece.stop),
                    prefix_spans=prefix,
                    trunks=tuple(first_id + trunk for trunk in trunks),
                    rank=rank,
                )
            )
    return microbatches


def _providers(above: list[tuple[int, int]], cuts: Sequence[Piece], starts: IntArray) -> tuple[int, ...]:
    """Pieces that hold runs of places, the innermost run first; the outermost piece first in the answer."""
    found: list[int] = []
    for first, stop in above:
        place = stop - 1
        while place >= first:
            holder = int(np.searchsorted(starts, place, side="right")) - 1
            if not found or found[-1] != holder:
                found.append(holder)
            if cuts[holder].again:
                return tuple(found[::-1])
            place = cuts[holder].start - 1
    return tuple(found[::-1])


def _rows_of_runs(walk: Traversal, runs: list[tuple[int, int]]) -> IntArray:
    """Spans of rows at runs of places, each within one segment."""
    spans = np.empty((len(runs), 2), np.int64)
    for index, (first, stop) in enumerate(runs):
        segment = walk.segment_of(first)
        start = int(walk.row[segment]) + first - int(walk.place[segment])
        spans[index] = start, start + stop - first
    return merge_spans(spans)
