"""Reads rollout files: JSONL or Parquet, a trajectory a row, or shape files, a tree a row (NumPy only).

A row of a rollout file has ``group`` (string or integer), ``token_ids`` (list of integers) or ``messages`` (with
optional ``tools``; needs a tokenizer), and optionally, a value a token where a list: ``loss_mask`` (0 or 1),
``advantage`` (one number or a list), ``reward`` (one number), ``old_logprobs``. A row of a shape file has ``group``,
``parent``, ``length``, ``sample_node`` and optionally ``reward`` (a number or null a trajectory) and ``trained``
(half-open token spans a trajectory).
"""

import gzip
import json
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harts_hf.errors import RolloutFileError
from harts_hf.tree import IntArray, RolloutTree

ROLLOUT_KEYS = ("group", "token_ids", "messages", "tools", "loss_mask", "advantage", "reward", "old_logprobs")
# No vocabulary is larger, and some kernels hold token ids in 32 bits.
MAX_TOKEN_ID = 2**31 - 1
SHAPE_KEYS = ("group", "parent", "length", "sample_node", "reward", "trained")


@dataclass(frozen=True, eq=False, kw_only=True)
class Rollout:
    """One trajectory of ``L`` tokens as a file gives it.

    Attributes:
        token_ids: ``[L]`` int64; None in a shape file.
        loss_mask: ``[L]`` bool, the tokens that the policy wrote; None if the file does not say.
        advantage: a float, or ``[L]`` float64 a token, or None.
        reward: a float or None.
        old_logprobs: ``[L]`` float64, log-prob of each token when it was sampled (entry 0 has no predictor), or None.
    """

    token_ids: IntArray | None
    loss_mask: NDArray[np.bool_] | None = None
    advantage: float | NDArray[np.float64] | None = None
    reward: float | None = None
    old_logprobs: NDArray[np.float64] | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class RolloutGroup:
    """The trajectories of one group.

    Attributes:
        name: the group as the file names it.
        rollouts: its trajectories in the order of the file.
        shape: the tree that a shape file gives; None for a rollout file.
    """

    name: str
    rollouts: tuple[Rollout, ...]
    shape: RolloutTree | None = None

    @cached_property
    def tree(self) -> RolloutTree:
        """The rollout tree; trajectory ``i`` is ``rollouts[i]``."""
        if self.shape is not None:
            return self.shape
        return RolloutTree.from_trajectories([rollout.token_ids for rollout in self.rollouts])  # type: ignore[misc]

    @property
    def rewards(self) -> list[float | None]:
        """Reward of each trajectory, None where the file has none."""
        return [rollout.reward for rollout in self.rollouts]


def read_rollouts(path: str | Path, tokenizer: Any = None) -> list[RolloutGroup]:
    """Reads ``.jsonl``, ``.jsonl.gz`` or ``.parquet``.

    Args:
        path: the file.
        tokenizer: anything with Transformers' ``apply_chat_template``; needed for rows with ``messages``. Their
            ``loss_mask``, if the row has none, is the template's assistant mask where it marks generations.

    Returns:
        The groups in the order of their first rows. Rows of a group need not be neighbours.

    Raises:
        FileNotFoundError: no such file.
        RolloutFileError: a row that is not what the module's docstring says; the message names the file and the line
            (Parquet: the row), counted from 1.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    rollouts: dict[str, list[Rollout]] = {}
    shapes: list[RolloutGroup] = []
    unit = "row" if path.suffix == ".parquet" else "line"
    for number, text in _lines(path):
        try:
            row = _parse(text)
            if "parent" in row:
                shapes.append(_shape(row))
            else:
                rollouts.setdefault(_group_name(row), []).append(_rollout(row, tokenizer))
            if shapes and rollouts:
                raise ValueError("expected rollouts only or shapes only, got both in one file")
        except ValueError as error:
            raise RolloutFileError(f"{path}, {unit} {number}: {error}") from error
    if not shapes and not rollouts:
        raise RolloutFileError(f"{path}: expected at least one trajectory, got an empty file")
    return shapes or [RolloutGroup(name=name, rollouts=tuple(rows)) for name, rows in rollouts.items()]


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Numbered lines of text, or numbered rows of a Parquet file."""
    number = 0
    if path.name.endswith(".parquet"):
        import pyarrow.parquet

        try:
            for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield number, {key: value for key, value in row.items() if value is not None}
        except pyarrow.ArrowException as error:
            raise RolloutFileError(f"{path}, after row {number}: expected a Parquet file ({error})") from error
    elif path.name.endswith((".jsonl", ".jsonl.gz")):
        try:
            with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
                for line in lines:
                    number += 1
                    if line.strip():
                        yield number, line
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise RolloutFileError(f"{path}, after line {number}: expected a whole gzip file ({error})") from error
    else:
        raise RolloutFileError(f"{path}: expected a .jsonl, .jsonl.gz or .parquet file")


def _parse(text: Any) -> Mapping[str, Any]:
    if isinstance(text, dict):
        return text
    try:
        row = json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"expected a JSON object, got invalid JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, got {type(row).__name__}")
    return row


def _check_keys(row: Mapping[str, Any], known: tuple[str, ...]) -> None:
    unknown = sorted(set(row) - set(known))
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}; known are {', '.join(known)}")


def _group_name(row: Mapping[str, Any]) -> str:
    group = row.get("group")
    if isinstance(group, bool) or not isinstance(group, str | int):
        raise ValueError(f"expected group to be a string or an integer, got {group!r}")
    return str(group)


def _rollout(row: Mapping[str, Any], tokenizer: Any) -> Rollout:
    _check_keys(row, ROLLOUT_KEYS)
    if ("token_ids" in row) == ("messages" in row):
        raise ValueError("expected either token_ids or messages")
    mask = row.get("loss_mask")
    if "messages" in row:
        tokens, template_mask = _tokenize(row, tokenizer)
        mask = template_mask if mask is None else mask
    else:
        tokens = row["token_ids"]
    token_ids = _integers("token_ids", tokens)
    if token_ids.min() < 0:
        raise ValueError(f"expected token ids of at least 0, got {token_ids.min()}")
    if token_ids.max() > MAX_TOKEN_ID:
        raise ValueError(f"expected token ids of at most {MAX_TOKEN_ID}, got {token_ids.max()}")
    size = len(token_ids)
    advantage = row.get("advantage")
    if isinstance(advantage, list):
        advantage = _floats("advantage", advantage, size)
    elif advantage is not None:
        advantage = _number("advantage", advantage)
    logprobs = row.get("old_logprobs")
    return Rollout(
        token_ids=token_ids,
        loss_mask=None if mask is None else _mask(mask, size),
        advantage=advantage,
        reward=_number("reward", row["reward"]) if row.get("reward") is not None else None,
        old_logprobs=None if logprobs is None else _floats("old_logprobs", logprobs, size),
    )


def _tokenize(row: Mapping[str, Any], tokenizer: Any) -> tuple[list[int], list[int] | None]:
    if tokenizer is None:
        raise ValueError("messages need a tokenizer, and none was given")
    messages, tools = row["messages"], row.get("tools")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise ValueError("expected messages to be a non-empty list of objects")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError("expected tools to be a list of objects")
    marks_generations = "{% generation" in (getattr(tokenizer, "chat_template", None) or "").replace("{%-", "{%")
    try:
        encoded = tokenizer.apply_chat_template(
            messages,
            tools=tools,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=marks_generations,
        )
    except Exception as error:  # templates are programs: they raise what they like, jinja2's errors among them
        raise ValueError(f"the chat template failed: {error}") from error
    return list(encoded["input_ids"]), list(encoded["assistant_masks"]) if marks_generations else None


def _shape(row: Mapping[str, Any]) -> RolloutGroup:
    _check_keys(row, SHAPE_KEYS)
    name = _group_name(row)
    missing = [key for key in ("length", "sample_node") if key not in row]
    if missing:
        raise ValueError(f"expected a shape with parent, length and sample_node, got none of {', '.join(missing)}")
    tree = RolloutTree.from_shape(*(_integers(key, row[key]) for key in ("parent", "length", "sample_node")))
    rewards, trained = (_per_trajectory(key, row.get(key), tree.num_trajectories) for key in ("reward", "trained"))
    rollouts = tuple(
        Rollout(
            token_ids=None,
            reward=None if reward is None else _number("reward", reward),
            loss_mask=None if spans is None else _spans(spans, int(length)),
        )
        for reward, spans, length in zip(rewards, trained, tree.trajectory_lengths, strict=True)
    )
    return RolloutGroup(name=name, rollouts=rollouts, shape=tree)


def _per_trajectory(key: str, values: Any, count: int) -> list[Any]:
    if values is None:
        return [None] * count
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"expected {key} to be a list of {count} values, one a trajectory")
    return values


def _spans(spans: Any, length: int) -> NDArray[np.bool_]:
    mask = np.zeros(length, bool)
    for span in spans if isinstance(spans, list) else [spans]:
        is_pair = isinstance(span, list) and [type(end) for end in span] == [int, int]
        if not is_pair or not 0 <= span[0] <= span[1] <= length:
            raise ValueError(f"expected trained spans [start, end) within {length} tokens, got {span}")
        mask[span[0] : span[1]] = True
    return mask


def _check_list(key: str, value: Any, size: int | None, types: set[type], what: str) -> list[Any]:
    """``value`` if it is a list of ``size`` values of exactly these types: to Python a bool is an int."""
    if not isinstance(value, list):
        raise ValueError(f"expected {key} to be a list of {what}, got {_shortened(value)}")
    if not value:
        raise ValueError(f"expected {key} of at least one value, got an empty list")
    if not types.issuperset(map(type, value)):
        place = next(place for place, entry in enumerate(value) if type(entry) not in types)
        raise ValueError(f"expected {key} to be a list of {what}, got {_shortened(value[place])} at position {place}")
    if size is not None and len(value) != size:
        raise ValueError(f"expected {key} of {size} values, one a token, got {len(value)}")
    return value


def _integers(key: str, value: Any) -> IntArray:
    try:
        return np.array(_check_list(key, value, None, {int}, "integers"), np.int64)
    except OverflowError as error:
        largest = max(value, key=abs)
        raise ValueError(f"expected {key} to be integers of 64 bits, got {_shortened(largest)}") from error


def _floats(key: str, value: Any, size: int) -> NDArray[np.float64]:
    try:
        array = np.array(_check_list(key, value, size, {int, float}, "numbers"), np.float64)
    except OverflowError as error:
        raise ValueError(f"expected {key} to be numbers that a float can hold") from error
    if not np.isfinite(array).all():
        place = int(np.flatnonzero(~np.isfinite(array))[0])
        raise ValueError(f"expected {key} to be finite, got {array[place]} at position {place}")
    return array


def _mask(value: Any, size: int) -> NDArray[np.bool_]:
    mask = _check_list("loss_mask", value, size, {int, bool}, "0 and 1")
    wrong = set(mask) - {0, 1}
    if wrong:
        raise ValueError(f"expected loss_mask to hold 0 and 1, got {_shortened(min(wrong))}")
    return np.array(mask, bool)


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"expected {key} to be a number, got {_shortened(value)}")
    if not abs(value) <= sys.float_info.max:  # NaN, too
        raise ValueError(f"expected {key} to be finite, got {_shortened(value)}")
    return float(value)
