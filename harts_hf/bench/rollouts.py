"""What one optimizer step of a benchmark trains on, and how TRL trainers are played it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harts_hf.forest import random_tokens
from harts_hf.rollouts.recorded import Rollout, RolloutGroup
from harts_hf.tree import IntArray, RolloutTree

LABELS = ("recorded", "all")


@dataclass(frozen=True, eq=False, kw_only=True)
class StepRollouts:
    """The ``n`` trajectories of one optimizer step.

    Attributes:
        groups: names of the groups that they come from.
        token_ids: ``[L]`` int64 each.
        prompt_lengths: tokens of each before its completion, at least 1.
        masks: ``[L - prompt]`` bool each, the tokens of the completion that are trained.
        rewards: ``[n]``, drawn from a normal distribution: equal ones would train nothing.
        old_logprobs: ``[L - prompt]`` float64 each, recorded when the tokens were sampled, NaN where unknown; or None.
        routes: ``[L, layers, k]`` integers each, the experts that the tokens have to take; None where routers choose.
    """

    groups: tuple[str, ...]
    token_ids: tuple[IntArray, ...]
    prompt_lengths: tuple[int, ...]
    masks: tuple[NDArray[np.bool_], ...]
    rewards: tuple[float, ...]
    old_logprobs: tuple[NDArray[np.float64], ...] | None = None
    routes: tuple[NDArray[np.int16], ...] | None = None

    @classmethod
    def of(
        cls, groups: Sequence[RolloutGroup], *, vocab_size: int, seed: int = 0, labels: str = "recorded"
    ) -> "StepRollouts":
        """The trajectories of some groups.

        Args:
            groups: of a rollout file; of shapes, tokens are drawn at random.
            vocab_size: of the model.
            seed: of rewards and random tokens.
            labels: ``"recorded"``: the file's loss masks (every token but the first, where it has none); ``"all"``:
                every token but the first.

        Raises:
            ValueError: another choice of labels; fewer than two trajectories that predict a token, or all equal; no
                token that is trained; token ids outside the vocabulary.
        """
        if labels not in LABELS:
            raise ValueError(f"expected labels to be one of {', '.join(LABELS)}, got {labels!r}")
        rng = np.random.default_rng(seed)
        pairs = [pair for group in groups for pair in _with_tokens(group, vocab_size, rng)]
        pairs = [(tokens, rollout) for tokens, rollout in pairs if len(tokens) > 1]
        if len(pairs) < 2:
            raise ValueError(f"expected at least two trajectories that predict a token in a step, got {len(pairs)}")
        if len({tokens.tobytes() for tokens, _ in pairs}) < 2:
            raise ValueError(
                f"expected at least two different trajectories in a step, got {len(pairs)} equal ones: their "
                "advantages add up to nothing, so nothing is trained"
            )
        largest = max(int(tokens.max()) for tokens, _ in pairs)
        if largest >= vocab_size:
            raise ValueError(f"expected token ids below the vocabulary size {vocab_size}, got {largest}")
        trained = [_trained(tokens, rollout, labels) for tokens, rollout in pairs]
        if not any(mask.any() for mask in trained):
            raise ValueError(
                f"expected at least one trained token in a step, got none in group "
                f"{', '.join(group.name for group in groups[:4])}: its loss masks train nothing (--labels all trains "
                "every token but the first)"
            )
        prompts = [min(max(1, int(mask.argmax())), len(mask) - 1) if mask.any() else len(mask) - 1 for mask in trained]
        old = [rollout.old_logprobs for _, rollout in pairs]
        return cls(
            groups=tuple(group.name for group in groups),
            token_ids=tuple(tokens for tokens, _ in pairs),
            prompt_lengths=tuple(prompts),
            masks=tuple(mask[prompt:] for mask, prompt in zip(trained, prompts, strict=True)),
            rewards=tuple(rng.normal(size=len(pairs)).tolist()),
            old_logprobs=None
            if any(values is None for values in old)
            else tuple(values[prompt:] for values, prompt in zip(old, prompts, strict=True)),  # type: ignore[index]
        )

    @cached_property
    def tree(self) -> RolloutTree:
        """The prefix tree of all trajectories."""
        return RolloutTree.from_trajectories(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of all trajectories, shared ones as often as they occur."""
        return sum(map(len, self.token_ids))

    @property
    def num_labels(self) -> tuple[int, int]:
        """Trained tokens of all trajectories, and rows of the tree that are trained."""
        return int(sum(mask.sum() for mask in self.masks)), self.labels_on(self.tree)

    def labels_on(self, tree: RolloutTree) -> int:
        """Rows that any trajectory trains, of a tree that has these trajectories in this order."""
        rows = np.zeros(tree.num_tokens, bool)
        for number, (prompt, mask) in enumerate(zip(self.prompt_lengths, self.masks, strict=True)):
            rows[tree.path(number)[prompt:][mask]] = True
        return int(rows.sum())

    def part(self, tokens: int) -> "StepRollouts":
        """At most so many tokens: of the trajectories that stand side by side in the tree, as many as fit.

        All of them if they fit; two different ones if no such two do. Rewards stay those of the trajectories.
        """
        lengths = np.array([len(ids) for ids in self.token_ids])
        if lengths.sum() <= tokens:
            return self
        order = np.argsort(self.tree.end_rows, kind="stable")
        ends = np.concatenate([[0], np.cumsum(lengths[order])])
        last = np.searchsorted(ends, ends[:-1] + tokens, side="right") - 1
        # Equal trajectories train nothing: each run of neighbours goes on to the first that is another.
        leaves = self.tree.end_rows[order]
        other = np.searchsorted(leaves, leaves, side="right")
        last = np.maximum(last, other + 1)[: int(other[other < len(order)].size)]
        fits = ends[last] - ends[: len(last)] <= tokens
        first = int(np.where(fits, last - np.arange(len(last)), -(ends[last] - ends[: len(last)])).argmax())
        return self._of(sorted(order[first : last[first]].tolist()))

    def _of(self, numbers: Sequence[int]) -> "StepRollouts":
        """Some of the trajectories."""
        names = ("token_ids", "prompt_lengths", "masks", "rewards", "old_logprobs", "routes")
        kept: dict[str, Any] = {name: getattr(self, name) for name in names}
        kept = {name: v if v is None else tuple(v[number] for number in numbers) for name, v in kept.items()}
        return replace(self, **kept)

    def filled(self, multiple: int) -> "StepRollouts":
        """With copies of the shortest trajectory that train nothing behind, up to a multiple of a number of rows."""
        missing = -len(self.token_ids) % multiple
        if not missing:
            return self
        number = min(range(len(self.token_ids)), key=lambda one: len(self.token_ids[one]))
        filler = self.token_ids[number][:2]
        return replace(
            self,
            token_ids=self.token_ids + (filler,) * missing,
            prompt_lengths=self.prompt_lengths + (1,) * missing,
            masks=self.masks + (np.zeros(1, bool),) * missing,
            rewards=self.rewards + (float(np.mean(self.rewards)),) * missing,
            old_logprobs=None if self.old_logprobs is None else self.old_logprobs + (np.full(1, np.nan),) * missing,
            routes=None if self.routes is None else self.routes + (self.routes[number][:2],) * missing,
        )

    def rollout_func(self) -> Callable[[list[Any], Any], dict[str, Any]]:
        """TRL's: answers with these rows, whatever it is asked; with the experts, where they are known."""
        answer = {
            "prompt_ids": [t[:p].tolist() for t, p in zip(self.token_ids, self.prompt_lengths, strict=True)],
            "completion_ids": [t[p:].tolist() for t, p in zip(self.token_ids, self.prompt_lengths, strict=True)],
            "logprobs": [[0.0] * len(mask) for mask in self.masks],
            "env_mask": [mask.astype(int).tolist() for mask in self.masks],
        }
        if self.routes is not None:
            answer["routed_experts"] = list(self.routes)
        return lambda prompts, trainer: {key: list(rows) for key, rows in answer.items()}

    def reward_func(self) -> Callable[..., list[float]]:
        """TRL's: the rewards in order."""

        def recorded_reward(completions: list[Any], **_: Any) -> list[float]:
            return list(self.rewards)

        recorded_reward.reads_texts = False  # type: ignore[attr-defined]  # as RecordedRollouts' own
        return recorded_reward


def steps_of(groups: Sequence[RolloutGroup], groups_per_step: int) -> list[list[RolloutGroup]]:
    """Groups in their order, so many to a step (the last step may have fewer).

    Raises:
        ValueError: fewer than one to a step.
    """
    if groups_per_step < 1:
        raise ValueError(f"expected at least one group per step, got {groups_per_step}")
    return [list(groups[start : start + groups_per_step]) for start in range(0, len(groups), groups_per_step)]


def _with_tokens(group: RolloutGroup, vocab_size: int, rng: np.random.Generator) -> list[tuple[IntArray, Rollout]]:
    if group.shape is None:
        return [(np.asarray(rollout.token_ids), rollout) for rollout in group.rollouts]
    tokens = random_tokens(group.shape, vocab_size, rng)
    return [(tokens[group.shape.path(number)], rollout) for number, rollout in enumerate(group.rollouts)]


def _trained(tokens: IntArray, rollout: Rollout, labels: str) -> NDArray[np.bool_]:
    """``[L]``; the first token is never trained, since nothing predicts it."""
    mask = rollout.loss_mask
    found = np.ones(len(tokens), bool) if mask is None or labels == "all" else mask.astype(bool).copy()
    found[0] = False
    return found
