"""Rewards of trained tokens: what a rollout function gave per turn or token, and what an episode ends with."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from harts_hf.rollouts.arrays import number_array
from harts_hf.rollouts.episodes import TOKEN_REWARDS, TURN_REWARDS
from harts_hf.rollouts.fields import shortened
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
        ValueError: both, another number of entries, what is no finite number, a reward before the first turn.
    """
    given = [key for key in (TURN_REWARDS, TOKEN_REWARDS) if output.get(key) is not None]
    if not given:
        return dict(output)
    if len(given) > 1:
        raise ValueError(f"expected either {TURN_REWARDS!r} or {TOKEN_REWARDS!r}, got both")
    name, completions = given[0], output["completion_ids"]
    rows = output[name]
    if not hasattr(rows, "__len__") or isinstance(rows, str | Mapping) or len(rows) != len(completions):
        raise ValueError(
            f"expected {name!r} to be a list of {len(completions)} entries, one per row, got {shortened(rows)}"
        )
    masks = output.get("env_mask") or [[1] * len(ids) for ids in completions]
    place = _of_turns if name == TURN_REWARDS else _of_tokens
    found = [
        place(_finite(rewards, f"{name}[{number}]"), np.asarray(mask), f"{name}[{number}]")
        for number, (rewards, mask) in enumerate(zip(rows, masks, strict=True))
    ]
    return {**{key: value for key, value in output.items() if key != TURN_REWARDS}, TOKEN_REWARDS: found}


def _finite(rewards: Any, name: str) -> Floats:
    """A row's rewards: a list, or an array or tensor of one axis."""
    if isinstance(rewards, torch.Tensor):
        rewards = rewards.detach().double().cpu().numpy()
    found = np.zeros(0) if isinstance(rewards, list | tuple) and not rewards else number_array(rewards)
    if found is not None and np.isfinite(found).all():
        return found.astype(np.float64)
    if isinstance(rewards, list | tuple):
        place = next(place for place, value in enumerate(rewards) if not _is_finite(value))
        raise ValueError(f"expected finite numbers in {name}, got {shortened(rewards[place])} at position {place}")
    raise ValueError(f"expected {name} to be a list of finite numbers, got {shortened(rewards)}")


def _is_finite(value: Any) -> bool:
    found = number_array([value])
    return found is not None and bool(np.isfinite(found).all())


def _of_turns(rewards: Floats, mask: NDArray[np.int64], name: str) -> list[float]:
    turns = turn_spans(mask, 0)
    if len(rewards) != len(turns):
        raise ValueError(
            f"expected {name} to have {len(turns)} entries, one per turn of the policy, got {len(rewards)}"
        )
    found = np.zeros(len(mask))
    for reward, (_, stop) in zip(rewards, turns, strict=True):
        found[stop - 1] = reward
    return found.tolist()


def _of_tokens(given: Floats, mask: NDArray[np.int64], name: str) -> list[float]:
    own = mask != 0
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
