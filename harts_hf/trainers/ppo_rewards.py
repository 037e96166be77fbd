"""Rewards of trained tokens: what a rollout function gave per turn or token, and what an episode ends with."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harts_hf.rollouts.episodes import TOKEN_REWARDS, TURN_REWARDS
from harts_hf.trainers.advantages import turn_spans

Floats = NDArray[np.float64]


def as_token_rewards(output: Mapping[str, Any]) -> dict[str, Any]:
    """A rollout function's output with ``token_rewards`` only, all of them at the policy's own tokens.

    A turn (a run of the policy's tokens) earns its reward at its last token. What an environment's token earned
    counts at the last token of the policy before it, whose consequence it is.

    Args:
        output: with ``turn_rewards`` (for each row one number per turn), ``token_rewards`` (for each row one number
            per completion token) or neither.

    Raises:
        ValueError: both, another number of entries, numbers that are not finite, a reward before the first turn.
    """
    given = [key for key in (TURN_REWARDS, TOKEN_REWARDS) if output.get(key) is not None]
    if not given:
        return dict(output)
    if len(given) > 1:
        raise ValueError(f"expected either {TURN_REWARDS!r} or {TOKEN_REWARDS!r}, got both")
    rows, completions = output[given[0]], output["completion_ids"]
    if len(rows) != len(completions):
        raise ValueError(f"expected {given[0]!r} to have {len(completions)} entries, one per row, got {len(rows)}")
    masks = output.get("env_mask") or [[1] * len(ids) for ids in completions]
    place = _of_turns if given[0] == TURN_REWARDS else _of_tokens
    found = []
    for number, (rewards, mask) in enumerate(zip(rows, masks, strict=True)):
        name = f"{given[0]}[{number}]"
        bad = [value for value in rewards if value is None or not math.isfinite(value)]
        if bad:
            raise ValueError(f"expected finite numbers in {name}, got {bad[0]}")
        found.append(place(rewards, np.asarray(mask), name))
    return {**{key: value for key, value in output.items() if key != TURN_REWARDS}, TOKEN_REWARDS: found}


def _of_turns(rewards: Sequence[float], mask: NDArray[np.int64], name: str) -> list[float]:
    turns = turn_spans(mask, 0)
    if len(rewards) != len(turns):
        raise ValueError(
            f"expected {name} to have {len(turns)} entries, one per turn of the policy, got {len(rewards)}"
        )
    found = np.zeros(len(mask))
    for reward, (_, stop) in zip(rewards, turns, strict=True):
        found[stop - 1] = reward
    return found.tolist()


def _of_tokens(rewards: Sequence[float], mask: NDArray[np.int64], name: str) -> list[float]:
    given, own = np.asarray(rewards, np.float64), mask != 0
    if len(given) != len(own):
        raise ValueError(f"expected {name} to have {len(own)} entries, one per completion token, got {len(given)}")
    last_own = np.maximum.accumulate(np.where(own, np.arange(len(own)), -1))
    if given[last_own < 0].any():
        raise ValueError(f"expected no reward before the first turn of the policy in {name}, got one")
    return np.bincount(np.maximum(last_own, 0), weights=given, minlength=len(own)).tolist()


def with_final_rewards(
    per_token: Floats, is_trained: NDArray[np.bool_], episode: NDArray[np.int64], final: Floats, *, of_samples: bool
) -> Floats:
    """``[B, C]`` rewards of trained tokens, with what episodes end with at their last trained token.

    Args:
        per_token: ``[B, C]``; what stands at other tokens is dropped (a token that recurs counts where it is trained).
        is_trained: ``[B, C]``.
        episode: ``[B]``, the episode of each row, ascending.
        final: ``[n]``, an episode's reward; of episodes without a trained token it is not read.
        of_samples: whether each row ends with what its episode earned after it, instead of the last one with
            ``final``.
    """
    found = np.where(is_trained, per_token, 0.0)
    rows = np.flatnonzero(is_trained.any(axis=1))
    last = is_trained.shape[1] - 1 - is_trained[:, ::-1].argmax(axis=1)
    if not of_samples:
        rows = rows[np.append(episode[rows][1:] != episode[rows][:-1], True)] if len(rows) else rows
        found[rows, last[rows]] += final[episode[rows]]
        return found
    of_row = found.sum(axis=1)
    up_to = np.cumsum(of_row)
    ends = np.cumsum(np.bincount(episode, minlength=len(final))) - 1
    later = up_to[ends[episode]] - up_to
    found[rows, last[rows]] += final[episode[rows]] + later[rows]
    return found
