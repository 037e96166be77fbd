"""Recorded rollouts as a TRL ``rollout_func``: training from files and data sets, nothing is sampled."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from harts_hf.rollouts.calls import Calls
from harts_hf.rollouts.episodes import ABSENT, EXACT_MASK, OFF_POLICY
from harts_hf.rollouts.recorded_checks import check_arguments, check_logprobs, check_trainer, uses_advantages
from harts_hf.rollouts.recorded_episodes import (
    RecordedEpisode,
    RecordedGroup,
    RecordedSample,
    read_groups,
    recorded_groups,
)

LOGPROBS = ("recorded", "rescored")
ADVANTAGES = ("auto", "recorded", "rewards")
OVERSIZED = ("error", "subsample")
TOO_LONG = ("error", "truncate")


class RecordedRollouts:
    """Plays recorded rollouts back; give it to a tree trainer as ``rollout_func``, its :meth:`dataset` as data set.

    Each prompt of the data set names a group. A call returns the group's episodes, of one sample or more each: a
    prompt ends before the first token that the policy wrote. A group of fewer than ``num_generations`` episodes is
    filled up with places that count nowhere, neither in statistics nor in losses.

    Example::

        recorded = RecordedRollouts("rollouts.jsonl", tokenizer=tokenizer)
        args = TreeGRPOConfig(num_generations=recorded.num_generations, max_completion_length=4096, ...)
        trainer = TreeGRPOTrainer(
            model, recorded_reward, args, train_dataset=recorded.dataset(), rollout_func=recorded
        )

    Args:
        source: a path or several of files that :func:`~harts_hf.rollouts.files.read_rollout_file` reads (groups of
            one name in two files are two groups), a ``datasets.Dataset`` or an iterable of such rows, a
            ``RolloutFile``, or an iterable of ``RolloutGroup`` or of ``Rollout`` (these are one group).
        tokenizer: with a chat template; needed for conversations.
        logprobs: what the policy's log-probs are compared with. ``"recorded"``: the ``old_logprobs`` of the rows, so
            training is off-policy: the ratio is ``pi / pi_recorded``. They have to be those of the trainer's
            temperature. A token whose log-prob is null has ratio 1 when the rollouts are handed out. ``"rescored"``:
            the policy's own when the rollouts are handed out, as if it had sampled them then; recorded ones are not
            used.
        format: the name of the files' form, or ``"auto"``.
        samples_per: ``"turn"`` or ``"conversation"``, for conversations.
        group_key: the key of each row's group; by default what the form has, or the whole file.
        advantages: ``"recorded"``: the rows' ``advantage``; ``"rewards"``: computed by the trainer from rewards;
            ``"auto"``: recorded ones where the rows have them.
        oversized: what becomes of a group of more than ``num_generations`` episodes in training (or
            ``num_generations_eval`` in evaluation). ``"error"``, or ``"subsample"``: so many of them are drawn without
            replacement at each visit, by the trainer's seed and step; an evaluation draws the same ones each time.
        too_long: what becomes of completions of more than ``max_completion_length`` tokens. ``"error"``, or
            ``"truncate"``: they end there, as sampling would have.
        exact_masks: whether a token that occurs twice in an episode, after the same history and with mask 1, was
            drawn twice. Otherwise it is taken for one draw and trained once.

    Attributes:
        group_sizes: episodes of each group, by the group's name.
        num_generations: episodes of the largest group.
        max_completion_length: tokens of the longest completion.
        has_recorded_advantages: whether advantages are the rows' own.

    Raises:
        FileNotFoundError: no such file.
        ValueError: an option that is none; a row that its form does not allow, without tokens of the policy, or
            without a log-prob or an advantage that was asked for. The message names the rows.
    """

    def __init__(
        self,
        source: Any,
        *,
        tokenizer: Any = None,
        logprobs: str = "recorded",
        format: str = "auto",
        samples_per: str = "turn",
        group_key: str | None = None,
        advantages: str = "auto",
        oversized: str = "error",
        too_long: str = "error",
        exact_masks: bool = False,
    ) -> None:
        for name, value, choices in (
            ("logprobs", logprobs, LOGPROBS),
            ("advantages", advantages, ADVANTAGES),
            ("oversized", oversized, OVERSIZED),
            ("too_long", too_long, TOO_LONG),
        ):
            if value not in choices:
                raise ValueError(f"expected {name} to be one of {', '.join(choices)}, got {value!r}")
        read = read_groups(source, tokenizer, format=format, samples_per=samples_per, group_key=group_key)
        self.groups: dict[str, RecordedGroup] = recorded_groups(read)
        self.is_off_policy = logprobs == "recorded"
        self.oversized, self.too_long = oversized, too_long
        self._exact_masks = exact_masks
        self._calls = Calls()
        self._numbers = {name: number for number, name in enumerate(self.groups)}
        if self.is_off_policy:
            check_logprobs(self.groups.values())
        self.has_recorded_advantages = uses_advantages(self.groups.values(), advantages)

    @property
    def group_sizes(self) -> dict[str, int]:
        """Episodes of each group."""
        return {name: len(group.episodes) for name, group in self.groups.items()}

    @property
    def num_generations(self) -> int:
        """Episodes of the largest group, which ``num_generations`` has to be (at least TRL's 2)."""
        return max(2, *self.group_sizes.values())

    @property
    def max_completion_length(self) -> int:
        """Tokens of the longest completion."""
        return max(sample.completion_length for group in self.groups.values() for sample in group.samples)

    def dataset(self) -> Any:
        """A ``datasets.Dataset`` with a row per group, in the order of the file: its ``prompt`` is the group's name.

        Any selection of its rows will do for training or evaluation.
        """
        from datasets import Dataset

        return Dataset.from_dict({"prompt": list(self.groups)})

    def check(self, args: Any) -> None:
        """Checks all groups against a trainer's arguments.

        Raises:
            ValueError: groups larger than ``num_generations``, fewer groups than a generation takes, completions of
                more than ``max_completion_length`` tokens (the message has the numbers that work); vLLM.
        """
        check_arguments(self, args)

    def check_trainer(self, trainer: Any) -> None:
        """Checks the groups that are used against a trainer; tree trainers do it when they are made.

        Raises:
            ValueError: see :meth:`check`; prompts that name no group; in groups that its data sets name, rows without
                the reward that :func:`recorded_reward` needs, token ids outside the model's vocabulary, advantages
                per token where the trainer knows none.
        """
        check_trainer(self, trainer, with_rewards=any(one is recorded_reward for one in trainer.reward_funcs))

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """The episodes that some prompts name.

        Args:
            prompts: this process's part of prompts that come repeated ``num_generations`` times; a group may lie on
                several processes.
            trainer: the tree trainer.

        Returns:
            Rows by ``episode``, as docs/rollouts.md has it.

        Raises:
            ValueError: see :meth:`check_trainer`; prompts that are not repeated so.
        """
        if not hasattr(trainer, "tree_policy"):
            raise ValueError(f"expected a TreeGRPOTrainer or a TreeGMPOTrainer, got {type(trainer).__name__}")
        chosen = self._chosen(prompts, trainer)
        rows = [
            (number, self._limited(sample, trainer.args.max_completion_length))
            for number, episode in enumerate(chosen)
            for sample in (() if episode is None else episode.samples)
        ]
        output: dict[str, Any] = {
            "episode": [number for number, _ in rows],
            "prompt_ids": [sample.token_ids[: sample.prompt_length].tolist() for _, sample in rows],
            "completion_ids": [sample.token_ids[sample.prompt_length :].tolist() for _, sample in rows],
            "env_mask": [sample.mask.astype(int).tolist() for _, sample in rows],
            "logprobs": [_logprobs(sample) for _, sample in rows] if self.is_off_policy else None,
            "recorded_reward": [None if episode is None else episode.reward for episode in chosen],
            ABSENT: [episode is None for episode in chosen],
            OFF_POLICY: self.is_off_policy,
            EXACT_MASK: self._exact_masks,
        }
        if self.has_recorded_advantages:
            output["advantages"] = [
                np.broadcast_to(0.0 if sample.advantage is None else sample.advantage, len(sample.mask)).tolist()
                for _, sample in rows
            ]
        return output

    def _chosen(self, prompts: list[Any], trainer: Any) -> list[RecordedEpisode | None]:
        """The episode of each prompt; None for the places of a group that has no more."""
        step, is_training, call = self._calls.next(trainer)
        size = trainer.num_generations if is_training else trainer.num_generations_eval
        # Ranks hold consecutive parts of equal length of the repeated prompts.
        first = trainer.accelerator.process_index * len(prompts)
        of_group: dict[str, list[RecordedEpisode | None]] = {}
        chosen = []
        for number, prompt in enumerate(prompts):
            place = (first + number) % size
            if place and number and prompt != prompts[number - 1]:
                raise ValueError(f"expected prompts repeated {size} times in a row, got another at prompt {number}")
            if not isinstance(prompt, str) or prompt not in self.groups:
                raise ValueError(f"expected prompts of the data set of these rollouts (groups' names), got {prompt!r}")
            if prompt not in of_group:
                entropy = (trainer.args.seed, self._numbers[prompt], *((step, call) if is_training else ()))
                of_group[prompt] = self._places(self.groups[prompt], size, entropy)
            chosen.append(of_group[prompt][place])
        return chosen

    def _places(self, group: RecordedGroup, size: int, entropy: Sequence[int]) -> list[RecordedEpisode | None]:
        missing = size - len(group.episodes)
        if missing >= 0:
            return [*group.episodes, *(None for _ in range(missing))]
        if self.oversized == "error":
            raise ValueError(
                f"expected groups of at most {size} episodes, got {len(group.episodes)} in {group.name!r}: set "
                f"num_generations={self.num_generations}, or oversized='subsample'"
            )
        drawn = np.random.default_rng(entropy).choice(len(group.episodes), size, replace=False)
        return [group.episodes[index] for index in sorted(drawn.tolist())]

    def _limited(self, sample: RecordedSample, limit: int | None) -> RecordedSample:
        if limit is None or sample.completion_length <= limit:
            return sample
        advantage = sample.advantage
        return replace(
            sample,
            token_ids=sample.token_ids[: sample.prompt_length + limit],
            mask=sample.mask[:limit],
            logprobs=None if sample.logprobs is None else sample.logprobs[:limit],
            advantage=advantage[:limit] if isinstance(advantage, np.ndarray) else advantage,
        )


def recorded_reward(*, recorded_reward: list[float | None], **_: Any) -> list[float]:
    """The reward function for :class:`RecordedRollouts`: what the file says of each episode.

    A missing one is 0: trainers check that there is none, unless advantages are recorded, and then it is only logged.
    """
    return [0.0 if reward is None else reward for reward in recorded_reward]


recorded_reward.reads_texts = False  # type: ignore[attr-defined]


def _logprobs(sample: RecordedSample) -> list[float]:
    if sample.logprobs is None:  # nothing of it is trained
        return [0.0] * sample.completion_length
    return np.where(sample.mask, sample.logprobs, 0.0).tolist()
