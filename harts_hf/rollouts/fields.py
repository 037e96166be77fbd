"""Fields of a row as arrays: exact types, sizes and finite numbers, or a ``ValueError`` that names the field."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harts_hf.tree import IntArray

# No vocabulary is larger, and some kernels hold token ids in 32 bits.
MAX_TOKEN_ID = 2**31 - 1


def check_keys(row: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuses a row with a key that is not ``known``."""
    unknown = sorted(set(row) - set(known))
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}; known are {', '.join(known)}")


def token_ids(value: Any) -> IntArray:
    """``[L]`` int64, L at least 1, in [0, ``MAX_TOKEN_ID``]."""
    ids = integers("token_ids", value)
    if ids.min() < 0:
        raise ValueError(f"expected token ids of at least 0, got {ids.min()}")
    if ids.max() > MAX_TOKEN_ID:
        raise ValueError(f"expected token ids of at most {MAX_TOKEN_ID}, got {ids.max()}")
    return ids


def integers(key: str, value: Any) -> IntArray:
    """``[L]`` int64 of a list of at least one integer."""
    try:
        return np.array(_check_list(key, value, None, {int}, "integers"), np.int64)
    except OverflowError as error:
        largest = max(value, key=abs)
        raise ValueError(f"expected {key} to be integers of 64 bits, got {shortened(largest)}") from error


def floats(key: str, value: Any, size: int) -> NDArray[np.float64]:
    """``[size]`` float64 of a list of finite numbers."""
    try:
        array = np.array(_check_list(key, value, size, {int, float}, "numbers"), np.float64)
    except OverflowError as error:
        raise ValueError(f"expected {key} to be numbers that a float can hold") from error
    if not np.isfinite(array).all():
        index = int(np.flatnonzero(~np.isfinite(array))[0])
        raise ValueError(f"expected {key} to be finite, got {array[index]} at position {index}")
    return array


def log_probs(key: str, value: Any, size: int) -> NDArray[np.float64]:
    """``[size]`` float64 of a list of finite numbers, and of null or NaN where one is unknown: NaN."""
    entries = _check_list(key, value, size, {int, float, type(None)}, "numbers and null")
    known = [0.0 if entry is None or entry != entry else entry for entry in entries]
    unknown = np.array([entry is None or entry != entry for entry in entries], np.bool_)
    return np.where(unknown, np.nan, floats(key, known, size))


def mask(value: Any, size: int) -> NDArray[np.bool_]:
    """``[size]`` bool of a list of 0 and 1."""
    entries = _check_list("loss_mask", value, size, {int, bool}, "0 and 1")
    wrong = set(entries) - {0, 1}
    if wrong:
        raise ValueError(f"expected loss_mask to hold 0 and 1, got {shortened(min(wrong))}")
    return np.array(entries, bool)


def spans(value: Any, length: int) -> NDArray[np.bool_]:
    """``[length]`` bool, True within the half-open spans ``[start, end)``."""
    inside = np.zeros(length, bool)
    for span in value if isinstance(value, list) else [value]:
        is_pair = isinstance(span, list) and [type(end) for end in span] == [int, int]
        if not is_pair or not 0 <= span[0] <= span[1] <= length:
            raise ValueError(f"expected trained spans [start, end) within {length} tokens, got {span}")
        inside[span[0] : span[1]] = True
    return inside


def number(key: str, value: Any) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"expected {key} to be a number, got {shortened(value)}")
    if not abs(value) <= sys.float_info.max:  # NaN, too
        raise ValueError(f"expected {key} to be finite, got {shortened(value)}")
    return float(value)


def shortened(value: Any) -> str:
    """``value`` for a message, cut to 40 characters."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _check_list(key: str, value: Any, size: int | None, types: set[type], what: str) -> list[Any]:
    """``value`` if it is a list of ``size`` values of exactly these types: to Python a bool is an int."""
    if not isinstance(value, list):
        raise ValueError(f"expected {key} to be a list of {what}, got {shortened(value)}")
    if not value:
        raise ValueError(f"expected {key} of at least one value, got an empty list")
    if not types.issuperset(map(type, value)):
        index = next(index for index, entry in enumerate(value) if type(entry) not in types)
        raise ValueError(f"expected {key} to be a list of {what}, got {shortened(value[index])} at position {index}")
    if size is not None and len(value) != size:
        raise ValueError(f"expected {key} of {size} values, one a token, got {len(value)}")
    return value
