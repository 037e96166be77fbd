"""Episodes: rollouts of one or more samples each, as a rollout function returns them.

An agent's requests need not extend one another: templates drop earlier thinking, contexts are compacted, sub-agents
start from histories of their own. Each request that does not is a sample, a row of its own; the rows of one rollout
are an episode. A rollout function says so by the key ``episode``: for each row the index of its prompt in the call.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harts_hf.tree import RolloutTree

# What a rollout function returns per row; every other list has one entry per episode.
TURN_REWARDS, TOKEN_REWARDS = "turn_rewards", "token_rewards"
# For each row the experts that its first tokens, prompt and completion, went to when they were sampled or read: an
# array [t, layers, k], a list of such arrays, or None. See docs/moe.md.
ROUTED_EXPERTS = "routed_experts"
ROW_KEYS = (
    "prompt_ids",
    "completion_ids",
    "logprobs",
    "env_mask",
    "advantages",
    TURN_REWARDS,
    TOKEN_REWARDS,
    ROUTED_EXPERTS,
    "episode",
)
# Given to reward functions by the trainer.
RESERVED_KEYS = ("samples",)
# True: masks are 1 only at tokens that a row drew itself, so that no sampled token recurs with mask 1.
EXACT_MASK = "exact_env_mask"
# One per prompt, true where the group has no such rollout: its place counts nowhere, in no statistic and in no loss.
# With ``episode`` such a prompt has no row; without it its row is there for its place, and is left out.
ABSENT = "absent"
# One per prompt, true where its episode was cut instead of ending by itself.
TRUNCATED = "truncated"
# True: the policy is compared with the log-probs that came with the rows, not with its own when they came.
OFF_POLICY = "off_policy"


@dataclass(frozen=True, eq=False, kw_only=True)
class Episodes:
    """Which rows belong to which rollout; every rollout has at least one.

    Attributes:
        index: ``[R]`` int64, ascending: the rollout of each row.
        is_empty: ``[n]`` bool, the rollouts without a sample; each has one row, of which nothing is trained.
        is_absent: ``[n]`` bool, those of them that stand for no rollout.
    """

    index: NDArray[np.int64]
    is_empty: NDArray[np.bool_]
    is_absent: NDArray[np.bool_]

    @property
    def counts(self) -> NDArray[np.int64]:
        """``[n]`` rows of each rollout, at least 1."""
        return np.bincount(self.index, minlength=len(self.is_empty))

    @property
    def last_rows(self) -> list[int]:
        """``[n]`` the last row of each rollout."""
        return (np.cumsum(self.counts) - 1).tolist()

    def of_each(self, rows: Sequence[Any]) -> list[list[Any]]:
        """``[R]`` values of rows as ``[n]`` lists, one per rollout."""
        ends = np.cumsum(self.counts).tolist()
        return [list(rows[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def without_absent(output: Mapping[str, Any]) -> dict[str, Any]:
    """The output of a rollout function with a row per prompt, some of them ``absent``, as one with ``episode``.

    Args:
        output: checked by :func:`harts_hf.rollouts.checks.check_rollouts`; without the key ``episode``.

    Returns:
        The same without the absent rows.
    """
    number = len(output["prompt_ids"])
    absent = list(output.get(ABSENT) or [False] * number)
    kept = [row for row in range(number) if not absent[row]]
    rows = {key: [output[key][row] for row in kept] for key in ROW_KEYS if output.get(key) is not None}
    return {**output, **rows, "episode": kept, ABSENT: absent}


def read_episodes(
    output: Mapping[str, Any], num_prompts: int, end_token: int, *, whole_ends: Collection[int] | None = None
) -> tuple[dict[str, Any], Episodes]:
    """Completes what a rollout function with the key ``episode`` returned.

    Args:
        output: checked by :func:`harts_hf.rollouts.checks.check_rollouts`.
        num_prompts: n, prompts of the call.
        end_token: what the row of an episode without a sample is made of.
        whole_ends: last tokens of the rows that are trained, if others are not (TRL's ``mask_truncated_completions``);
            None if all are.

    Returns:
        The output without ``episode``, where an episode without a sample has one row with a mask of zeros and a
        sampled token that recurs within its episode (the same history, the same token) is trained in the first row
        only that has it and is trained, unless the masks are exact; and the episodes.
    """
    given = np.asarray(output["episode"], np.int64)
    is_empty = np.bincount(given, minlength=num_prompts) == 0
    fillers = np.flatnonzero(is_empty)
    index = np.concatenate([given, fillers])
    order = np.argsort(index, kind="stable")
    is_absent = np.array(output.get(ABSENT) or np.zeros(num_prompts), np.bool_)
    episodes = Episodes(index=index[order], is_empty=is_empty, is_absent=is_absent)

    def completed(rows: Sequence[Any], filler: list[Any]) -> list[Any]:
        every = [*rows, *(list(filler) for _ in fillers)]
        return [every[row] for row in order.tolist()]

    found = {key: value for key, value in output.items() if key not in (*ROW_KEYS, EXACT_MASK, ABSENT)}
    found["prompt_ids"] = completed(output["prompt_ids"], [end_token])
    found["completion_ids"] = completed(output["completion_ids"], [end_token])
    found["logprobs"] = None if output["logprobs"] is None else completed(output["logprobs"], [0.0])
    if output.get("advantages") is not None:
        found["advantages"] = completed(output["advantages"], [0.0])
    if output.get(TOKEN_REWARDS) is not None:
        found[TOKEN_REWARDS] = completed(output[TOKEN_REWARDS], [0.0])
    if output.get(ROUTED_EXPERTS) is not None:
        every = [*output[ROUTED_EXPERTS], *(None for _ in fillers)]
        found[ROUTED_EXPERTS] = [every[row] for row in order.tolist()]
    masks = [
        [1] * len(ids) if mask is None else mask
        for ids, mask in zip(
            found["completion_ids"],
            completed([None] * len(given) if output.get("env_mask") is None else output["env_mask"], [0]),
            strict=True,
        )
    ]
    counts = [whole_ends is None or ids[-1] in whole_ends for ids in found["completion_ids"]]
    if output.get(EXACT_MASK):
        trained = [list(mask) for mask in masks]
    else:
        trained = _trained_once(found["prompt_ids"], found["completion_ids"], masks, counts, episodes)
    if output.get("env_mask") is not None or not all(map(all, trained)):
        found["env_mask"] = trained
    return found, episodes


def _trained_once(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    masks: Sequence[Sequence[int]],
    counts: Sequence[bool],
    episodes: Episodes,
) -> list[list[int]]:
    found = []
    rows = episodes.of_each(range(len(masks)))
    for of_episode in rows:
        if len(of_episode) == 1:
            found.append(list(masks[of_episode[0]]))
            continue
        tree = RolloutTree.from_trajectories([np.asarray([*prompts[row], *completions[row]]) for row in of_episode])
        is_trained = np.zeros(tree.num_tokens, bool)
        for number, row in enumerate(of_episode):
            mask = np.asarray(masks[row], bool)
            path = tree.path(number)[len(prompts[row]) :]
            mask &= ~is_trained[path]
            if counts[row]:
                is_trained[path[mask]] = True
            found.append(mask.astype(int).tolist())
    return found
