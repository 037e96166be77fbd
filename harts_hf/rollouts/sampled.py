"""What was sampled: whole conversations, the leaves of trees."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harts_hf.rollouts.environment import Environment
from harts_hf.rollouts.environments.failures import EpisodeFailure
from harts_hf.rollouts.fork_tree import ForkTree, Place


@dataclass(frozen=True, kw_only=True)
class SampledRollout:
    """One leaf of a tree: a whole conversation.

    Attributes:
        prompt_ids: ``[P]`` token ids that the policy read first; none if its environment failed before.
        completion_ids: ``[C]`` token ids after them, C at least 1 except for such a failure.
        logprobs: ``[C]`` log-prob of each sampled token (see :class:`SampledTurn`), 0.0 at the environment's tokens.
        env_mask: ``[C]`` 1 at the policy's tokens, 0 at the environment's.
        reward: the environment's reward; None where it has none.
        num_turns: turns begun.
        tree: index of the tree (the prompt group) that it is a leaf of.
        path: the branch taken at each history that was continued more than once; equal for rollouts that are copies.
        fork_turns: as many; the turn that each of those branches begins with, 0 the first.
        cut: whether a limit ended it (turns, tokens), before its environment was done.
        failure: why the environment could not go on, or None.
        routed_experts: ``[t, L, k]`` arrays, one behind the other: the engine's routes of the first tokens, of all but
            the last at a turn's end; None where they were not asked for.
        environment: as it stood at the end; None for a failure.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    env_mask: list[int]
    reward: float | None
    num_turns: int
    tree: int
    path: tuple[int, ...]
    fork_turns: tuple[int, ...]
    cut: bool = False
    failure: EpisodeFailure | None = field(default=None, compare=False)
    routed_experts: list[NDArray[np.integer[Any]]] | None = field(default=None, compare=False, repr=False)
    environment: Environment | None = field(default=None, compare=False, repr=False)


def rollout_of(tree: ForkTree, end: Place) -> SampledRollout:
    """The conversation that is over at ``end``."""
    way = end.way()
    completion: list[int] = []
    logprobs: list[float] = []
    mask: list[int] = []
    for place in way[1:]:
        assert place.sampled is not None
        completion += [*place.sampled.token_ids, *place.answer_ids]
        logprobs += [*place.sampled.logprobs, *[0.0] * len(place.answer_ids)]
        mask += [1] * len(place.sampled.token_ids) + [0] * len(place.answer_ids)
    routes = [place.sampled.routed_experts for place in way[1:] if place.sampled is not None]
    forked = [place for place in way[1:] if place.parent is not None and len(place.parent.children) > 1]
    return SampledRollout(
        prompt_ids=list(way[0].answer_ids),
        completion_ids=completion,
        logprobs=logprobs,
        env_mask=mask,
        reward=end.reward,
        num_turns=end.turn,
        tree=tree.index,
        path=tuple(place.branch for place in forked),
        fork_turns=tuple(place.turn - 1 for place in forked),
        cut=end.cut,
        failure=end.failure,
        routed_experts=[one for one in routes if one is not None] or None,
        environment=end.ended,
    )
