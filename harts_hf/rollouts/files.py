"""Reads rollout files: JSONL or Parquet, one trajectory per row, or shape files, one tree per row (NumPy only).

A row of a rollout file has ``group`` (string or integer), ``token_ids`` (list of integers) or ``messages`` (with
optional ``tools``; needs a tokenizer), and optionally, with one value per token where a list: ``loss_mask`` (0 or 1),
``advantage`` (one number or a list), ``reward`` (one number), ``old_logprobs``. A row of a shape file has ``group``,
``parent``, ``length``, ``sample_node`` and optionally ``reward`` (a number or null per trajectory) and ``trained``
(half-open token spans per trajectory). A key whose value is null is as absent.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harts_hf.errors import RolloutFileError
from harts_hf.rollouts import fields
from harts_hf.rollouts.messages import tokenize_messages
from harts_hf.rollouts.rows import numbered_rows
from harts_hf.tree import IntArray, RolloutTree

ROLLOUT_KEYS = ("group", "token_ids", "messages", "tools", "loss_mask", "advantage", "reward", "old_logprobs")
SHAPE_KEYS = ("group", "parent", "length", "sample_node", "reward", "trained")
# Rows of a tree are numbered in 64 bits; a sum of lengths beyond this is a mistake, not a tree.
MAX_SHAPE_TOKENS = 2**40


@dataclass(frozen=True, eq=False, kw_only=True)
class Rollout:
    """One trajectory of ``L`` tokens as a file gives it.

    Attributes:
        token_ids: ``[L]`` int64; None in a shape file.
        loss_mask: ``[L]`` bool, the tokens that the policy wrote; None if the file does not say.
        advantage: a float, or ``[L]`` float64 per token, or None.
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
        RolloutFileError: a row that is not what the module's docstring says; messages that are not wholly in the
            tokens. The text names the file and the line (Parquet: the row), counted from 1.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    rollouts: dict[str, list[Rollout]] = {}
    shapes: list[RolloutGroup] = []
    for where, row in numbered_rows(path):
        try:
            if "parent" in row:
                shapes.append(_shape(row))
            else:
                rollouts.setdefault(_group_name(row), []).append(_rollout(row, tokenizer))
            if shapes and rollouts:
                raise ValueError("expected rollouts only or shapes only, got both in one file")
        except ValueError as error:
            raise RolloutFileError(f"{path}, {where}: {error}") from error
    if not shapes and not rollouts:
        raise RolloutFileError(f"{path}: expected at least one trajectory, got an empty file")
    return shapes or [RolloutGroup(name=name, rollouts=tuple(rows)) for name, rows in rollouts.items()]


def _group_name(row: Mapping[str, Any]) -> str:
    group = row.get("group")
    if isinstance(group, bool) or not isinstance(group, str | int):
        raise ValueError(f"expected group to be a string or an integer, got {group!r}")
    return str(group)


def _rollout(row: Mapping[str, Any], tokenizer: Any) -> Rollout:
    fields.check_keys(row, ROLLOUT_KEYS)
    if ("token_ids" in row) == ("messages" in row):
        raise ValueError("expected either token_ids or messages")
    mask = row.get("loss_mask")
    if "messages" in row:
        tokens, template_mask = tokenize_messages(row["messages"], row.get("tools"), tokenizer)
        mask = template_mask if mask is None else mask
    else:
        tokens = row["token_ids"]
    token_ids = fields.token_ids(tokens)
    size = len(token_ids)
    advantage, logprobs = row.get("advantage"), row.get("old_logprobs")
    if isinstance(advantage, list):
        advantage = fields.floats("advantage", advantage, size)
    elif advantage is not None:
        advantage = fields.number("advantage", advantage)
    return Rollout(
        token_ids=token_ids,
        loss_mask=None if mask is None else fields.mask(mask, size),
        advantage=advantage,
        reward=fields.number("reward", row["reward"]) if "reward" in row else None,
        old_logprobs=None if logprobs is None else fields.floats("old_logprobs", logprobs, size),
    )


def _shape(row: Mapping[str, Any]) -> RolloutGroup:
    fields.check_keys(row, SHAPE_KEYS)
    name = _group_name(row)
    missing = [key for key in ("length", "sample_node") if key not in row]
    if missing:
        raise ValueError(f"expected a shape with parent, length and sample_node, got none of {', '.join(missing)}")
    parent, length, sample_node = (fields.integers(key, row[key]) for key in ("parent", "length", "sample_node"))
    if sum(length.tolist()) > MAX_SHAPE_TOKENS:  # in Python's integers: those of NumPy would wrap around
        raise ValueError(f"expected lengths of at most {MAX_SHAPE_TOKENS:,} tokens in all, got {sum(length.tolist())}")
    tree = RolloutTree.from_shape(parent, length, sample_node)
    rewards, trained = (_per_trajectory(key, row.get(key), tree.num_trajectories) for key in ("reward", "trained"))
    rollouts = tuple(
        Rollout(
            token_ids=None,
            reward=None if reward is None else fields.number("reward", reward),
            loss_mask=None if spans is None else fields.spans(spans, int(num_tokens)),
        )
        for reward, spans, num_tokens in zip(rewards, trained, tree.trajectory_lengths, strict=True)
    )
    return RolloutGroup(name=name, rollouts=rollouts, shape=tree)


def _per_trajectory(key: str, values: Any, count: int) -> list[Any]:
    if values is None:
        return [None] * count
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"expected {key} to be a list of {count} values, one per trajectory")
    return values
