"""Rollout files made of the suite's recorded rollouts and episodes, and their playback under watch."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from harts_hf.rollouts import RecordedRollouts
from support import recorded
from support.episodes import Episode, Generation, RaggedRollouts, episodes_of

Source = Callable[[str, int], list[Episode]]


def as_row(group: str, prompt: list[int], completion: list[int], mask: list[int], logprobs: list[float]) -> dict:
    """A row of a rollout file, with null where a log-prob is unknown."""
    known = [None if np.isnan(value) else value for value in logprobs]
    return {
        "group": group,
        "token_ids": prompt + completion,
        "loss_mask": [0] * len(prompt) + mask,
        "old_logprobs": [None] * len(prompt) + known,
    }


def rows_of_prompts() -> list[dict[str, Any]]:
    """What :func:`support.recorded.rollout_func` returns for each prompt, as rows of a file."""
    rows = []
    for prompt in recorded.dataset()["prompt"]:
        found = recorded.rollouts_of(prompt)
        values = zip(*(found[key] for key in ("prompt_ids", "completion_ids", "env_mask", "logprobs")), strict=True)
        for value, reward in zip(values, found["recorded_reward"], strict=True):
            rows.append({**as_row(prompt, *value), "reward": reward})
    return rows


def rows_of_episodes(source: Source = episodes_of) -> list[dict[str, Any]]:
    """The samples of each prompt's episodes; those without one are not in the file."""
    rows = []
    for prompt in recorded.dataset()["prompt"]:
        for number, episode in enumerate(source(prompt, recorded.NUM_GENERATIONS)):
            for one in episode.samples:
                row = as_row(prompt, one.prompt_ids, one.completion_ids, one.env_mask, one.logprobs)
                rows.append({**row, "episode": number, "reward": episode.reward})
    return rows


def episodes_with_unknown(prompt: str, count: int, prompts: Sequence[str] | None = None) -> list[Episode]:
    """The episodes of a prompt, every third log-prob of them unknown: of all prompts, or of some."""
    episodes = episodes_of(prompt, count)
    if prompts is not None and prompt not in prompts:
        return episodes

    def forget(values: list[float]) -> list[float]:
        return [np.nan if place % 3 == 1 else value for place, value in enumerate(values)]

    return [
        replace(episode, samples=[replace(one, logprobs=forget(one.logprobs)) for one in episode.samples])
        for episode in episodes
    ]


class WatchedRecording(RecordedRollouts):
    """Notes for the oracle what it hands out: ``log`` has the episodes of each call, absent ones last in a group."""

    def __init__(self, *args: Any, source: Source = episodes_of, **options: Any) -> None:
        super().__init__(*args, **options)
        self.log = RaggedRollouts()
        self._episodes_of = source

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """The recording's answer."""
        is_training = trainer.model.training
        size = trainer.num_generations if is_training else trainer.num_generations_eval
        first = trainer.accelerator.process_index * len(prompts)
        episodes = []
        for number, prompt in enumerate(prompts, first):
            present = [one for one in self._episodes_of(prompt, recorded.NUM_GENERATIONS) if one.samples]
            absent = Episode(samples=[], reward=0.0, is_absent=True)
            episodes.append([*present, *[absent] * (size - len(present))][number % size])
        into = self.log.training if is_training else self.log.evaluation
        into.append(Generation(episodes=episodes, global_step=trainer.state.global_step))
        return super().__call__(prompts, trainer)
