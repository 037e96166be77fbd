"""Rows as half-open spans ``[k, 2]`` (NumPy only)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from harts_hf.tree import IntArray

NO_SPANS = np.zeros((0, 2), np.int64)


def span_size(spans: IntArray) -> int:
    """How many rows spans hold."""
    return int((spans[:, 1] - spans[:, 0]).sum())


def spans_of_rows(rows: IntArray) -> IntArray:
    """Ascending rows as ascending spans that do not touch.

    Raises:
        ValueError: rows that do not ascend.
    """
    if len(rows) == 0:
        return NO_SPANS
    steps = np.diff(rows)
    if (steps <= 0).any():
        raise ValueError("expected ascending rows without repeats")
    breaks = np.flatnonzero(steps != 1) + 1
    return np.stack([rows[np.append(0, breaks)], rows[np.append(breaks, len(rows)) - 1] + 1], axis=1)


def rows_of_spans(spans: IntArray) -> IntArray:
    """The rows in spans, in the order of the spans."""
    return expand_ranges(spans[:, 0], spans[:, 1])[1]


def expand_ranges(starts: IntArray, stops: IntArray) -> tuple[IntArray, IntArray]:
    """The integers of many ranges (none where ``stop <= start``), one range after the other.

    Returns:
        For each integer the index of its range; the integers.
    """
    count = np.maximum(stops - starts, 0)
    index = np.repeat(np.arange(len(count)), count)
    before = np.cumsum(count) - count
    return index, np.arange(len(index)) + np.repeat(starts - before, count)


def sorted_unique(values: IntArray) -> IntArray:
    """The distinct values, ascending. By sorting: ``np.unique`` hashes integers, which takes far longer."""
    values = np.sort(values)
    return values[np.append(np.ones(min(len(values), 1), bool), values[1:] != values[:-1])]


def merge_spans(spans: IntArray) -> IntArray:
    """Disjoint spans in ascending order, neighbours that touch made one."""
    if len(spans) < 2:
        return spans
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    starts_new = np.append(True, spans[1:, 0] != spans[:-1, 1])
    return np.stack([spans[starts_new, 0], spans[np.append(starts_new[1:], True), 1]], axis=1)


def contains(spans: IntArray, rows: IntArray) -> NDArray[np.bool_]:
    """Which of ``rows`` lie in ascending disjoint spans."""
    if len(spans) == 0:
        return np.zeros(len(rows), bool)
    if len(spans) == 1:
        return (rows >= spans[0, 0]) & (rows < spans[0, 1])
    index = np.searchsorted(spans[:, 0], rows, side="right") - 1
    return (index >= 0) & (rows < spans[index, 1])


def count_below(spans: IntArray, rows: IntArray) -> IntArray:
    """How many rows of ascending disjoint spans are smaller than each of ``rows``."""
    if len(spans) == 1:
        return np.clip(rows, spans[0, 0], spans[0, 1]) - spans[0, 0]
    before = np.append(0, np.cumsum(spans[:, 1] - spans[:, 0]))
    after = np.searchsorted(spans[:, 0], rows)  # spans that begin below a row
    last = np.maximum(after - 1, 0)
    return np.where(after > 0, before[last] + np.minimum(rows, spans[last, 1]) - spans[last, 0], 0)


def places_in(spans: IntArray, rows: IntArray) -> IntArray:
    """Number of each of ``rows`` among those of ascending disjoint spans, -1 for rows that are in none."""
    if len(spans) == 0:
        return np.full(len(rows), -1)
    if len(spans) == 1:
        start, stop = spans[0].tolist()
        return np.where((rows >= start) & (rows < stop), rows - start, -1)
    before = np.cumsum(spans[:, 1] - spans[:, 0]) - (spans[:, 1] - spans[:, 0])
    index = np.searchsorted(spans[:, 0], rows, side="right") - 1
    inside = (index >= 0) & (rows < spans[index, 1])
    return np.where(inside, rows - spans[index, 0] + before[index], -1)


def intersect(first: IntArray, second: IntArray) -> tuple[IntArray, IntArray]:
    """Common rows of any spans with ascending disjoint ones.

    Returns:
        For each common span the index of the span of ``first`` that it lies in; the common spans.
    """
    low = np.searchsorted(second[:, 1], first[:, 0], side="right")
    high = np.searchsorted(second[:, 0], first[:, 1], side="left")
    mine, other = expand_ranges(low, high)
    start = np.maximum(first[mine, 0], second[other, 0])
    stop = np.minimum(first[mine, 1], second[other, 1])
    return mine, np.stack([start, stop], axis=1)


def union(spans: Sequence[IntArray]) -> IntArray:
    """All rows of several lists of spans, as ascending spans that do not touch."""
    together = np.concatenate([NO_SPANS, *spans])
    if len(together) == 0:
        return together
    together = together[np.argsort(together[:, 0], kind="stable")]
    reach = np.maximum.accumulate(together[:, 1])
    fresh = np.append(True, together[1:, 0] > reach[:-1])
    stops = reach[np.append(np.flatnonzero(fresh)[1:] - 1, len(reach) - 1)]
    return np.stack([together[fresh, 0], stops], axis=1)
