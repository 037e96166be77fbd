"""Checks of what a rollout function returns, before any step is lost."""

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from harts_hf.rollouts.arrays import ReadArrays, number_array
from harts_hf.rollouts.episodes import ABSENT, EXACT_MASK, OFF_POLICY, RESERVED_KEYS, ROW_KEYS
from harts_hf.rollouts.fields import shortened

REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
TOKENS = ("prompt_ids", "completion_ids")
VALUES = ("logprobs", "env_mask", "advantages")
# Rows of fewer numbers are joined before they are checked: a call on a short array is mostly overhead.
_LONG = 65_536
# A log-prob above it is none (rounding to bfloat16 makes at most an eighth of a 0); probabilities are taken for them.
_HIGHEST = 0.5


def check_rollouts(
    output: dict[str, Any], num_prompts: int, *, vocab_size: int | None = None, arrays: ReadArrays | None = None
) -> None:
    """Checks a rollout function's output against TRL's contract, and that of episodes.

    Args:
        output: ``prompt_ids``, ``completion_ids``, ``logprobs`` (a list of lists each, or ``logprobs`` None), and
            optionally ``env_mask`` and ``advantages`` of the completions' lengths. With ``episode`` (for each row the
            index of its prompt) there may be any number of rows, and every other list has one entry per prompt;
            without it there is one row per prompt. ``exact_env_mask`` says that no sampled token has mask 1 twice,
            ``absent`` (one per prompt) which episodes without a row, or rows where there is no ``episode``, are none,
            ``off_policy`` that the policy is compared with ``logprobs``.
        num_prompts: prompts that the function was given; they come repeated.
        vocab_size: if given, token ids are checked against it.
        arrays: where the arrays of token ids are kept that this makes.

    Raises:
        ValueError: missing keys, another number of rows or of entries in any other list, indices of ``episode`` that
            are none or do not ascend, an empty prompt or completion, token ids that are no integers or out of range,
            a mask, log-probs or advantages of another length or not finite, a mask that is not 0 or 1, log-probs above
            0 by more than rounding. A log-prob may be None or NaN: TRL takes it as unknown.
    """
    if not isinstance(output, dict):
        raise ValueError(f"expected rollout_func to return a dict, got {type(output).__name__}")
    missing = [key for key in REQUIRED if key not in output]
    if missing:
        raise ValueError(f"expected rollout_func to return {', '.join(REQUIRED)}, got no {', '.join(missing)}")
    if output.get(OFF_POLICY) not in (None, True, False):
        raise ValueError(f"expected {OFF_POLICY!r} to be true or false, got {shortened(output[OFF_POLICY])}")
    if output.get(OFF_POLICY) and output["logprobs"] is None:
        raise ValueError(f"expected 'logprobs' where {OFF_POLICY!r} is set, got none")
    num_rows = _check_episodes(output, num_prompts) if output.get("episode") is not None else num_prompts
    for key in ROW_KEYS:
        rows = output.get(key)
        if rows is not None and len(rows) != num_rows:
            raise ValueError(
                f"expected rollout_func to return {num_rows} rows, as many as 'episode' has entries, got {len(rows)} "
                f"in {key!r}"
                if output.get("episode") is not None
                else f"expected rollout_func to return {num_rows} rows for {num_prompts} prompts (prompts come "
                "already repeated num_generations times; rollouts of several rows need the key 'episode', the index "
                f"of each row's prompt), got {len(rows)} in {key!r}"
            )
    if output.get("episode") is None:
        if output.get(ABSENT) is not None:
            _check_absent(output[ABSENT], set(), num_prompts)
        _check_other_lists(output, num_prompts, "row (what is the same for all rows is no list)")
    arrays = ReadArrays() if arrays is None else arrays
    for row in _to_look_at(output, num_rows, vocab_size, arrays):
        for key in TOKENS:
            tokens = output[key][row]
            _check_tokens(tokens, arrays[tokens], f"{key}[{row}]", vocab_size)
        length = len(output["completion_ids"][row])
        for key in VALUES:
            values = output.get(key)
            if values is not None:
                _check_values(values[row], key, row, length)


def _check_episodes(output: dict[str, Any], num_prompts: int) -> int:
    """The number of rows that ``episode`` names."""
    reserved = [key for key in RESERVED_KEYS if key in output]
    if reserved:
        raise ValueError(
            f"expected no {', '.join(reserved)} beside 'episode' (reward functions get it from the trainer), got one"
        )
    if output.get(EXACT_MASK) not in (None, True, False):
        raise ValueError(f"expected {EXACT_MASK!r} to be true or false, got {shortened(output[EXACT_MASK])}")
    if output.get(EXACT_MASK) and output.get("env_mask") is None:
        raise ValueError(f"expected 'env_mask' where {EXACT_MASK!r} is set, got none")
    index = output["episode"]
    if not hasattr(index, "__len__") or isinstance(index, str):
        raise ValueError(f"expected 'episode' to be a list of indices, one per row, got {shortened(index)}")
    previous = 0
    for row, value in enumerate(index):
        try:
            number = -1 if isinstance(value, bool) else operator.index(value)
        except TypeError:
            number = -1
        if not 0 <= number < num_prompts:
            raise ValueError(
                f"expected 'episode' to hold indices of prompts in [0, {num_prompts}), got {shortened(value)} in row "
                f"{row}"
            )
        if number < previous:
            raise ValueError(
                "expected the rows of an episode together and in the order of the prompts, got episode "
                f"{number} after {previous} in row {row}"
            )
        previous = number
    _check_other_lists(output, num_prompts, f"episode (only {', '.join(ROW_KEYS)} have one per row)")
    if output.get(ABSENT) is not None:
        _check_absent(output[ABSENT], set(map(int, index)), num_prompts)
    return len(index)


def _check_other_lists(output: dict[str, Any], count: int, per: str) -> None:
    """Of lists for reward functions: TRL hands out the first entries of a longer one, and none where one ends."""
    for key, value in output.items():
        if key not in ROW_KEYS and isinstance(value, list) and len(value) != count:
            raise ValueError(f"expected {key!r} to have {count} entries, one per {per}, got {len(value)}")


def _check_absent(absent: Any, with_rows: set[int], num_prompts: int) -> None:
    if not isinstance(absent, list) or len(absent) != num_prompts or not set(absent) <= {True, False}:
        raise ValueError(
            f"expected {ABSENT!r} to be a list of {num_prompts} of true and false, got {shortened(absent)}"
        )
    both = [number for number in sorted(with_rows) if absent[number]]
    if both:
        raise ValueError(f"expected no rows of an episode that is {ABSENT!r}, got some of episode {both[0]}")


def _to_look_at(output: dict[str, Any], num_rows: int, vocab_size: int | None, arrays: ReadArrays) -> Sequence[int]:
    """Rows that may hold an error, ascending: those that are no arrays of the right lengths, or all if a number of any
    is wrong."""
    unread: set[int] = set()
    lengths: list[int] = []
    for key in (*TOKENS, *(key for key in VALUES if output.get(key) is not None)):
        read = arrays.numbers if key in ("logprobs", "advantages") else arrays.__getitem__
        found = [read(row) for row in output[key]]
        if key == "completion_ids":
            lengths = [0 if one is None else len(one) for one in found]
        unread.update(
            row
            for row, one in enumerate(found)
            if one is None or len(one) == 0 or (key in VALUES and len(one) != lengths[row])
        )
        # An array that several rows have, such as a group's prompt, is looked at once.
        for joined in _joined({id(one): one for one in found if one is not None and len(one)}.values()):
            if not (_in_vocabulary(joined, vocab_size) if key in TOKENS else _are_good(joined, key)):
                return range(num_rows)
    return sorted(unread)


def _joined(arrays: Iterable[NDArray[Any]]) -> Iterator[NDArray[Any]]:
    held: list[NDArray[Any]] = []
    size = 0
    for one in arrays:
        if len(one) >= _LONG:
            yield one
            continue
        held.append(one)
        size += len(one)
        if size >= _LONG:
            yield np.concatenate(held)
            held, size = [], 0
    if held:
        yield np.concatenate(held)


def _in_vocabulary(tokens: NDArray[Any], vocab_size: int | None) -> bool:
    return bool(tokens.min() >= 0 and (vocab_size is None or tokens.max() < vocab_size))


def _check_tokens(tokens: Any, found: NDArray[Any] | None, name: str, vocab_size: int | None) -> None:
    if len(tokens) == 0:
        raise ValueError(f"expected {name} to hold at least one token, got none")
    if found is None:  # TRL would pad floats into a tensor of integers, which cuts them
        for position, value in enumerate(tokens):
            if not _is_integer(value):
                raise ValueError(f"expected integers in {name}, got {shortened(value)} at position {position}")
    low, high = (min(tokens), max(tokens)) if found is None else (found.min(), found.max())
    if low < 0 or (vocab_size is not None and high >= vocab_size):
        raise ValueError(f"expected token ids in [0, {vocab_size}) in {name}, got {low if low < 0 else high}")


def _is_integer(value: Any) -> bool:
    if getattr(value, "ndim", None) == 0:
        value = value.item()  # tensors have __index__ whatever they hold
    return isinstance(value, SupportsIndex) and not isinstance(value, bool) and not hasattr(value, "ndim")


def _check_values(values: Any, key: str, row: int, length: int) -> None:
    name = f"{key}[{row}]"
    if not hasattr(values, "__len__"):
        raise ValueError(f"expected {name} to be a list of {length} entries, got {values!r}")
    if len(values) != length:
        raise ValueError(f"expected {name} to have {length} entries, one per completion token, got {len(values)}")
    found = number_array(values)
    if found is not None and _are_good(found, key):
        return
    for position, value in enumerate(values):
        if key == "env_mask" and value not in (0, 1):
            raise ValueError(f"expected 0 or 1 in {name}, got {value} at position {position}")
        if key == "logprobs" and (value is None or value != value):
            continue
        if key == "logprobs" and _HIGHEST < value < math.inf:
            raise ValueError(
                f"expected log-probs of at most 0 in {name}, got {value} at position {position} (a probability?)"
            )
        if value is None or not math.isfinite(value):
            raise ValueError(f"expected finite numbers in {name}, got {value} at position {position}")


def _are_good(values: NDArray[Any], key: str) -> bool:
    if key == "env_mask":
        return bool(((values == 0) | (values == 1)).all())
    if key == "logprobs":
        return not (np.isinf(values) | (values > _HIGHEST)).any()
    return bool(np.isfinite(values).all())
