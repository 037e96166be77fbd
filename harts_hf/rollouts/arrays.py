"""Rollouts' lists of numbers as arrays: NumPy and PyTorch read arrays at once, and lists a Python object at a time."""

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray


def integer_array(row: Any) -> NDArray[Any] | None:
    """``[L]`` int64 of a list, array or tensor of integers; None for anything else.

    Bools are none, as PyTorch makes another dtype of them. Never a narrower dtype: TRL pads rows in that of the first
    one, and larger ids of others would wrap around.
    """
    if isinstance(row, list | tuple) and row and isinstance(row[0], bool):
        return None
    found = _as_array(row, "q", "iu")
    return None if found is None else found.astype(np.int64, copy=False)


def number_array(row: Any) -> NDArray[Any] | None:
    """``[L]`` float64 of a list of numbers, or an array or tensor of numbers as it is; None for anything else
    (unknowns)."""
    return _as_array(row, "d", "iuf")


class ReadArrays:
    """Lists of numbers as arrays, each list read once: a group's prompt stands in many rows, checks read before TRL.

    A list is known by its identity, so it must not change as long as this lives.
    """

    def __init__(self) -> None:
        # By identity of lists, which live as long as their arrays.
        self._found: dict[int, tuple[Any, NDArray[Any] | None]] = {}
        self._numbers: dict[int, tuple[Any, NDArray[Any] | None]] = {}

    def __getitem__(self, row: Any) -> NDArray[Any] | None:
        """As :func:`integer_array`."""
        if id(row) not in self._found:
            self._found[id(row)] = row, integer_array(row)
        return self._found[id(row)][1]

    def numbers(self, row: Any) -> NDArray[Any] | None:
        """As :func:`number_array`."""
        if id(row) not in self._numbers:
            self._numbers[id(row)] = row, number_array(row)
        return self._numbers[id(row)][1]

    def of_rows(self, rows: list[Any]) -> list[Any]:
        """Each row as an array, or as it is where it is no list of integers."""
        arrays = [self[row] for row in rows]
        return [row if array is None else array for row, array in zip(rows, arrays, strict=True)]


def _as_array(row: Any, code: str, kinds: str) -> NDArray[Any] | None:
    if not isinstance(row, np.ndarray) and hasattr(row, "__array__"):  # a tensor
        try:
            row = np.asarray(row)
        except (TypeError, RuntimeError):  # on a GPU, with a gradient, or of a dtype that NumPy lacks
            return None
    if isinstance(row, np.ndarray):
        return row if row.ndim == 1 and row.dtype.kind in kinds else None
    if not isinstance(row, list | tuple) or not row:
        return None
    try:
        # Half the time of array.array: 7 ns a number.
        return np.frombuffer(struct.pack(f"{len(row)}{code}", *row), np.dtype(code))
    except (TypeError, OverflowError, struct.error):
        return None
