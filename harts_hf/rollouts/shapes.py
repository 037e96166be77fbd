"""Rows of shape files: a tree each, without its tokens."""

from collections.abc import Mapping
from typing import Any

from harts_hf.rollouts import fields
from harts_hf.rollouts.recorded import Rollout, RolloutGroup
from harts_hf.tree import RolloutTree

# Rows of a tree are numbered in 64 bits; a sum of lengths beyond this is a mistake, not a tree.
MAX_SHAPE_TOKENS = 2**40


def shape_group(row: Mapping[str, Any], name: str) -> RolloutGroup:
    """The group of a row, with its tree.

    Raises:
        ValueError: a field that is missing or no tree.
    """
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
