"""Rollouts' lists of numbers as arrays: NumPy and PyTorch read arrays at once, and lists a Python object at a time."""

from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray


def integer_array(row: Any) -> NDArray[Any] | None:
    """``[L]`` int64 of a list of integers, or an array of integers as it is; None for anything else.

    Bools are none, as PyTorch makes another dtype of them.
    """
    if isinstance(row, list | tuple) and row and isinstance(row[0], bool):
        return None
    return _as_array(row, "q", "iu")


def number_array(row: Any) -> NDArray[Any] | None:
    """``[L]`` float64 of a list of numbers, or an array of numbers as it is; None for anything else (unknowns)."""
    return _as_array(row, "d", "iuf")


def integer_arrays(rows: list[Any]) -> list[Any]:
    """Each row as :func:`integer_array` gives it, or as it is where that gives none.

    A list that stands in several rows (the prompt of a group) is read once.
    """
    by_identity = {id(row): row for row in rows}
    arrays = {key: integer_array(row) for key, row in by_identity.items()}
    return [row if arrays[id(row)] is None else arrays[id(row)] for row in rows]


def _as_array(row: Any, code: str, kinds: str) -> NDArray[Any] | None:
    if isinstance(row, np.ndarray):
        return row if row.ndim == 1 and row.dtype.kind in kinds else None
    if not isinstance(row, list | tuple) or not row:
        return None
    try:
        return np.frombuffer(array(code, row), np.dtype(code))
    except (TypeError, OverflowError):
        return None
