"""One microbatch of a plan, kept as spans of rows (NumPy only)."""

from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from harts_hf.planner.spans import NO_SPANS, contains, rows_of_spans, span_size, spans_of_rows
from harts_hf.tree import IntArray


class Microbatch:
    """Rows of a tree that run in one model forward. Arrays of rows are made from spans on first use.

    Attributes:
        id: its index in ``Schedule.microbatches``.
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
        self.id, self.rank, self.trunks = id, rank, trunks
        self.row_spans = spans_of_rows(row_array)
        self.owned_spans = spans_of_rows(row_array[np.asarray(owned, bool)])
        self.prefix_spans = spans_of_rows(np.asarray(prefix, np.int64))

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
        microbatch.id, microbatch.rank, microbatch.trunks = id, rank, trunks
        microbatch.row_spans, microbatch.owned_spans = row_spans, owned_spans
        microbatch.prefix_spans = prefix_spans
        return microbatch

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
        return contains(self.owned_spans, self.rows)

    @cached_property
    def prefix(self) -> IntArray:
        """``[p]`` rows that are not computed here but read from the handoff of ``trunks``, ascending.

        Each is computed by exactly one of the trunks. Together with ``rows`` they are closed under ``parent``.
        """
        return rows_of_spans(self.prefix_spans)

    @cached_property
    def trunk_ids(self) -> IntArray:
        """``trunks`` as an array."""
        return np.array(self.trunks, np.int64)

    @cached_property
    def num_rows(self) -> int:
        """Network rows."""
        return span_size(self.row_spans)

    @cached_property
    def num_prefix(self) -> int:
        """Rows read from trunks."""
        return span_size(self.prefix_spans)

    def __repr__(self) -> str:
        return (
            f"Microbatch(id={self.id}, rank={self.rank}, rows={self.num_rows}, prefix={self.num_prefix}, "
            f"trunks={self.trunks})"
        )
