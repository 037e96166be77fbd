"""One microbatch of a plan, kept as spans of rows (NumPy only)."""

from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from harts_hf.tree import IntArray

NO_SPANS = np.zeros((0, 2), np.int64)


class Microbatch:
    """Rows of a tree that run in one model forward. Arrays of rows are made from spans on first use.

    Attributes:
        id: its place in ``Schedule.microbatches``.
        rank: the rank that runs it.
        trunks: ids of the microbatches whose states are read, the outermost first; on the same rank, below ``id``.
        row_spans: ``[k, 2]`` half-open spans of ``rows``, ascending, not touching.
        owned_spans: ``[k, 2]`` of the owned rows.
        prefix_spans: ``[k, 2]`` of ``prefix``.
    """

    def __init__(
        self,
        *,
        id: int,
        rows: ArrayLike,
        owned: ArrayLike,
        prefix: ArrayLike = (),
        trunks: tuple[int, ...] = (),
        rank: int = 0,
    ) -> None:
        row_array = np.asarray(rows, np.int64)
        self._set(
            id=id,
            row_spans=_spans_of(row_array),
            owned_spans=_spans_of(row_array[np.asarray(owned, bool)]),
            prefix_spans=_spans_of(np.asarray(prefix, np.int64)),
            trunks=trunks,
            rank=rank,
        )

    @classmethod
    def from_spans(
        cls,
        *,
        id: int,
        row_spans: IntArray,
        owned_spans: IntArray,
        prefix_spans: IntArray = NO_SPANS,
        trunks: tuple[int, ...] = (),
        rank: int = 0,
    ) -> "Microbatch":
        """A microbatch from ascending disjoint spans instead of arrays of rows."""
        microbatch = cls.__new__(cls)
        microbatch._set(
            id=id, row_spans=row_spans, owned_spans=owned_spans, prefix_spans=prefix_spans, trunks=trunks, rank=rank
        )
        return microbatch

    def _set(
        self,
        *,
        id: int,
        row_spans: IntArray,
        owned_spans: IntArray,
        prefix_spans: IntArray,
        trunks: tuple[int, ...],
        rank: int,
    ) -> None:
        self.id, self.rank, self.trunks = id, rank, trunks
        self.row_spans, self.owned_spans, self.prefix_spans = row_spans, owned_spans, prefix_spans

    @cached_property
    def rows(self) -> IntArray:
        """``[n]`` rows that the network computes here, ascending (so in preorder)."""
        return rows_of_spans(self.row_spans)

    @cached_property
    def owned(self) -> NDArray[np.bool_]:
        """``[n]`` whether this microbatch is the owner of the row.

        The owner scores the row's labels (the tokens that stand directly below the row) and counts the row in
        statistics. A row that is not owned is a prefix computed again. Over all microbatches every row of the tree is
        owned exactly once.
        """
        return np.isin(self.rows, rows_of_spans(self.owned_spans), assume_unique=True)

    @cached_property
    def prefix(self) -> IntArray:
        """``[p]`` rows that are not computed here but read from the handoff of ``trunks``, ascending.

        Each is computed by exactly one of the trunks. Together with ``rows`` they are closed under ``parent``.
        """
        return rows_of_spans(self.prefix_spans)

    @property
    def num_rows(self) -> int:
        """Network rows."""
        return span_size(self.row_spans)

    @property
    def num_prefix(self) -> int:
        """Rows read from trunks."""
        return span_size(self.prefix_spans)

    def __repr__(self) -> str:
        return (
            f"Microbatch(id={self.id}, rank={self.rank}, rows={self.num_rows}, prefix={self.num_prefix}, "
            f"trunks={self.trunks})"
        )


def rows_of_spans(spans: IntArray) -> IntArray:
    """The rows in half-open spans ``[k, 2]``, in order."""
    if len(spans) == 0:
        return np.zeros(0, np.int64)
    return np.concatenate([np.arange(start, stop) for start, stop in spans.tolist()])


def span_size(spans: IntArray) -> int:
    """How many rows half-open spans hold."""
    return int((spans[:, 1] - spans[:, 0]).sum())


def _spans_of(rows: IntArray) -> IntArray:
    """Ascending rows as spans."""
    if len(rows) == 0:
        return NO_SPANS
    if (np.diff(rows) <= 0).any():
        raise ValueError("expected ascending rows without repeats")
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    starts = rows[np.append(0, breaks)]
    stops = rows[np.append(breaks, len(rows)) - 1] + 1
    return np.stack([starts, stops], axis=1)
