"""Checks of what a rollout function returns, before any step is lost."""

import math
from typing import Any

REQUIRED = ("prompt_ids", "completion_ids", "logprobs")


def check_rollouts(output: dict[str, Any], num_prompts: int, *, vocab_size: int | None = None) -> None:
    """Checks a rollout function's output against TRL's contract.

    Args:
        output: ``prompt_ids``, ``completion_ids``, ``logprobs`` (a list of lists each, or ``logprobs`` None), and
            optionally ``env_mask`` and ``advantages`` of the completions' lengths.
        num_prompts: prompts that the function was given; they come repeated, and as many rows go back.
        vocab_size: if given, token ids are checked against it.

    Raises:
        ValueError: missing keys, another number of rows, an empty prompt or completion, token ids out of range, a
            mask, log-probs or advantages of another length or not finite, a mask that is not 0 or 1. A log-prob may be
            None or NaN: TRL takes it as unknown.
    """
    if not isinstance(output, dict):
        raise ValueError(f"expected rollout_func to return a dict, got {type(output).__name__}")
    missing = [key for key in REQUIRED if key not in output]
    if missing:
        raise ValueError(f"expected rollout_func to return {', '.join(REQUIRED)}, got no {', '.join(missing)}")
    for key in ("prompt_ids", "completion_ids", "logprobs", "env_mask", "advantages"):
        rows = output.get(key)
        if rows is not None and len(rows) != num_prompts:
            raise ValueError(
                f"expected rollout_func to return {num_prompts} rows for {num_prompts} prompts (prompts come already "
                f"repeated num_generations times), got {len(rows)} in {key!r}"
            )
    for row in range(num_prompts):
        for key in ("prompt_ids", "completion_ids"):
            _check_tokens(output[key][row], f"{key}[{row}]", vocab_size)
        length = len(output["completion_ids"][row])
        for key in ("logprobs", "env_mask", "advantages"):
            values = output.get(key)
            if values is not None and values[row] is not None:
                _check_values(values[row], key, row, length)


def _check_tokens(tokens: Any, name: str, vocab_size: int | None) -> None:
    if len(tokens) == 0:
        raise ValueError(f"expected {name} to hold at least one token, got none")
    low, high = min(tokens), max(tokens)
    if low < 0 or (vocab_size is not None and high >= vocab_size):
        raise ValueError(f"expected token ids in [0, {vocab_size}) in {name}, got {low if low < 0 else high}")


def _check_values(values: Any, key: str, row: int, length: int) -> None:
    name = f"{key}[{row}]"
    if not hasattr(values, "__len__"):
        raise ValueError(f"expected {name} to be a list of {length} entries, got {values!r}")
    if len(values) != length:
        raise ValueError(f"expected {name} to have {length} entries, one per completion token, got {len(values)}")
    for position, value in enumerate(values):
        if key == "env_mask" and value not in (0, 1):
            raise ValueError(f"expected 0 or 1 in {name}, got {value} at position {position}")
        if key == "logprobs" and (value is None or value != value):
            continue
        if value is None or not math.isfinite(value):
            raise ValueError(f"expected finite numbers in {name}, got {value} at position {position}")
