"""Credit per turn on a rollout tree (NumPy only).

The value of a history is the mean reward of the trajectories that share it token by token. Where a trajectory parts
from others, the turn that parts it is credited with what it changed: the value after it less the value before it, the
"local advantage" of TreeRL (Hou et al., arXiv 2506.11902, section 3.2). Turns that no fork tells apart, such as those
below the last fork, form one step with the parting turn above them and carry the same credit (Tree-GRPO, Ji et al.,
arXiv 2509.21240, takes whole steps as nodes likewise). TreeRL adds the "global advantage", the value after less the
root's; it is left out: it also rewards whatever a conversation does after it has gone well.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from harts_hf.tree import RolloutTree

FloatArray = NDArray[np.float64]

# What TRL adds to a standard deviation that it divides by.
_EPSILON = 1e-4


def turn_advantages(
    trajectories: Sequence[ArrayLike],
    turn_spans: Sequence[Sequence[tuple[int, int]]],
    rewards: ArrayLike,
    groups: ArrayLike,
    *,
    scale: Literal["group", "batch", "none"],
) -> list[FloatArray]:
    """Advantages of the policy's turns from the rewards below them.

    Args:
        trajectories: token ids of prompt and completion, ``[L_i]`` each.
        turn_spans: for each trajectory the half-open spans ``[start, end)`` of its turns, ascending, in positions of
            the trajectory.
        rewards: ``[B]``; NaN for a trajectory that could not be scored, which then counts nowhere.
        groups: ``[B]`` integers; trajectories with the same number answer the same prompt and form one tree.
        scale: as TRL's ``scale_rewards``: divide by the standard deviation (ddof 1) of the group's rewards, of the
            batch's, or not.

    Returns:
        ``[L_i]`` float64 for each trajectory: a turn's advantage at its tokens, 0 elsewhere.

    Raises:
        ValueError: numbers of rows that differ, spans that are not ascending or outside the trajectory, another scale.
    """
    reward = np.asarray(rewards, np.float64)
    group = np.asarray(groups)
    counts = {"trajectories": len(trajectories), "turn_spans": len(turn_spans), "rewards": len(reward)}
    if len(set(counts.values()) | {len(group)}) != 1:
        raise ValueError(f"expected one entry a trajectory, got {counts} and {len(group)} groups")
    if scale not in ("group", "batch", "none"):
        raise ValueError(f"expected scale to be 'group', 'batch' or 'none', got {scale!r}")
    for row, spans in enumerate(turn_spans):
        _check_spans(spans, len(np.asarray(trajectories[row])), row)

    advantages: list[FloatArray] = [np.zeros(0)] * len(reward)
    for number in np.unique(group):
        rows = np.flatnonzero(group == number).tolist()
        tree = RolloutTree.from_trajectories([trajectories[row] for row in rows])
        values = _history_values(tree, reward[rows])
        divisor = _divisor(reward[rows] if scale == "group" else reward, scale)
        for index, row in enumerate(rows):
            advantages[row] = _trajectory_advantages(tree, index, values, turn_spans[row]) / divisor
            if np.isnan(reward[row]):
                advantages[row][:] = 0.0
    return advantages


def _trajectory_advantages(
    tree: RolloutTree, index: int, values: FloatArray, spans: Sequence[tuple[int, int]]
) -> FloatArray:
    path = tree.path(index)
    shared_by = tree.occurrence_counts[path]
    root_value, root_count = values[-1], tree.num_trajectories
    advantages = np.zeros(len(path))
    baseline = root_value
    for start, end in spans:
        before, count = (values[path[start - 1]], shared_by[start - 1]) if start else (root_value, root_count)
        if shared_by[end - 1] < count:
            baseline = before
        advantages[start:end] = values[path[end - 1]] - baseline
    return advantages


def _history_values(tree: RolloutTree, rewards: FloatArray) -> FloatArray:
    """``[N + 1]`` mean reward of the scored trajectories through each row, and of all; 0 where there are none."""
    scored = ~np.isnan(rewards)

    def below(weights: FloatArray) -> FloatArray:
        before = np.zeros(tree.num_tokens + 1)
        np.cumsum(np.bincount(tree.end_rows, weights=weights, minlength=tree.num_tokens), out=before[1:])
        return np.append(before[tree.subtree_end] - before[:-1], before[-1])

    counts = below(scored.astype(np.float64))
    return np.divide(below(np.where(scored, rewards, 0.0)), counts, out=np.zeros(len(counts)), where=counts > 0)


def _divisor(rewards: FloatArray, scale: str) -> float:
    scored = rewards[~np.isnan(rewards)]
    if scale == "none":
        return 1.0
    return float(np.std(scored, ddof=1)) + _EPSILON if len(scored) > 1 else 1.0


def _check_spans(spans: Sequence[tuple[int, int]], length: int, row: int) -> None:
    position = 0
    for start, end in spans:
        if not position <= start < end <= length:
            got = list(map(tuple, spans))
            raise ValueError(f"expected ascending turn spans inside [0, {length}) of trajectory {row}, got {got}")
        position = end
