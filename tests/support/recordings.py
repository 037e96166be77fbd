"""Rollout files made of the suite's recorded rollouts and episodes, and their playback under watch."""

from collections.abc import Callable
from typing import Any

from harts_hf.rollouts import RecordedRollouts
from support import recorded
from support.episodes import Episode, Generation, RaggedRollouts, episodes_of


def rows_of_prompts() -> list[dict[str, Any]]:
    """What :func:`support.recorded.rollout_func` returns for each prompt, as rows of a file."""
    rows = []
    for prompt in recorded.dataset()["prompt"]:
        found = recorded.rollouts_of(prompt)
        for number in range(recorded.NUM_GENERATIONS):
            row = {key: values[number] for key, values in found.items()}
            rows.append(
                as_row(prompt, None, row["prompt_ids"], row["completion_ids"], row["env_mask"], row["logprobs"])
                | {"reward": row["recorded_reward"]}
            )
    return rows


def as_row(
    group: str, episode: int | None, prompt: list[int], completion: list[int], mask: list[int], logprobs: list[Any]
) -> dict[str, Any]:
    """A row of a rollout file."""
    return {
        "group": group,
        **({} if episode is None else {"episode": episode}),
        "token_ids": prompt + completion,
        "loss_mask": [0] * len(prompt) + mask,
        "old_logprobs": [None] * len(prompt) + logprobs,
    }


def rows_of_episodes(change: Callable[[dict[str, Any]], Any] | None = None) -> list[dict[str, Any]]:
    """The samples of each prompt's episodes; those without one are not in the file."""
    rows = []
    for prompt in recorded.dataset()["prompt"]:
        for number, episode in enumerate(episodes_of(prompt, recorded.NUM_GENERATIONS)):
            for sample in episode.samples:
                row = as_row(
                    prompt, number, sample.prompt_ids, sample.completion_ids, sample.env_mask, sample.logprobs
                )
                rows.append({**row, "reward": episode.reward})
                if change is not None:
                    change(rows[-1])
    return rows


class WatchedRecording(RecordedRollouts):
    """Notes for the oracle what it hands out: ``log`` has the episodes of each call, absent ones last in a group."""

    def __init__(
        self, *args: Any, source_of: Callable[[str, int], list[Episode]] = episodes_of, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.log = RaggedRollouts()
        self._source_of = source_of

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """The recording's answer."""
        is_training = trainer.model.training
        size = trainer.num_generations if is_training else trainer.num_generations_eval
        episodes = []
        for prompt in prompts[::size]:
            present = [one for one in self._source_of(prompt, recorded.NUM_GENERATIONS) if one.samples]
            absent = Episode(samples=[], reward=0.0, is_absent=True)
            episodes += [*present, *[absent] * (size - len(present))]
        into = self.log.training if is_training else self.log.evaluation
        into.append(Generation(episodes=episodes, global_step=trainer.state.global_step))
        return super().__call__(prompts, trainer)
