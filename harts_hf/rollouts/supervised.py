"""Recorded rollouts as a data set for supervised training: rejection sampling, reward-weighted regression."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from harts_hf.rollouts.recorded_episodes import RecordedEpisode, RecordedSample, read_groups, recorded_groups

# TRL's and PyTorch's mark of a token without a loss.
IGNORED = -100

# From an episode's reward and those of its group to the weight of its rows.
Weight = Callable[[float, Sequence[float]], float]
# Weights by name.
WEIGHTS: dict[str, Weight] = {
    "reward": lambda reward, rewards: reward,
    "best": lambda reward, rewards: float(reward == max(rewards)),
}


def supervised_dataset(
    source: Any,
    *,
    tokenizer: Any = None,
    weight: Weight | str | None = None,
    format: str = "auto",
    samples_per: str = "turn",
    group_key: str | None = None,
) -> Any:
    """The rows of recorded rollouts for ``TreeSFTTrainer`` (or TRL's ``SFTTrainer``), tokenised.

    Example, the best rollouts of each group only::

        rows = supervised_dataset("results.jsonl.gz", tokenizer=tokenizer, weight="best")
        TreeSFTTrainer(model, TreeSFTConfig(max_length=None, ...), train_dataset=rows).train()

    Args:
        source: a path or several, a data set or rows; see :class:`~harts_hf.rollouts.RecordedRollouts`.
        tokenizer: with a chat template; needed for conversations.
        weight: of an episode's rows: a function of its reward and of the rewards of its group; ``"reward"`` for the
            reward itself; ``"best"`` for 1 where it is the highest of its group, else 0; None for no weights. Rows of
            weight 0 are left out. (TRL's own trainer knows no weights.)
        format: the name of the files' form, or ``"auto"``.
        samples_per: ``"turn"`` or ``"conversation"``, for conversations.
        group_key: the key of each row's group; by default what the form has, or the whole file.

    Returns:
        A ``datasets.Dataset`` with ``input_ids`` and ``labels`` (-100 where the policy did not write), ``group``, and
        ``weight`` if there are weights.

    Raises:
        FileNotFoundError: no such file.
        ValueError: an option that is none; a row that its form does not allow; an episode without a reward where
            weights are asked for, a weight that is no finite number, no row of another weight than 0.
    """
    from datasets import Dataset

    weigh = WEIGHTS.get(weight) if isinstance(weight, str) else weight
    if not callable(weigh) and weight is not None:
        raise ValueError(f"expected weight to be a function, {', '.join(map(repr, WEIGHTS))} or None, got {weight!r}")
    groups = recorded_groups(
        read_groups(source, tokenizer, format=format, samples_per=samples_per, group_key=group_key)
    )
    columns: dict[str, list[Any]] = {"input_ids": [], "labels": [], "group": []}
    if weigh is not None:
        columns["weight"] = []
    for name, group in groups.items():
        rewards = [] if weigh is None else [_reward(episode) for episode in group.episodes]
        for number, episode in enumerate(group.episodes):
            weight_of = 1.0 if weigh is None else _weight(weigh, number, rewards, episode)
            for sample in episode.samples if weight_of else ():
                columns["input_ids"].append(sample.token_ids)
                columns["labels"].append(_labels(sample))
                columns["group"].append(name)
                if weigh is not None:
                    columns["weight"].append(weight_of)
    if not columns["input_ids"]:
        raise ValueError("expected at least one row of another weight than 0, got none")
    return Dataset.from_dict(columns)


def _labels(sample: RecordedSample) -> Any:
    labels = sample.token_ids.astype(np.int64)
    labels[: sample.prompt_length] = IGNORED
    labels[sample.prompt_length :][~sample.mask] = IGNORED
    return labels


def _reward(episode: RecordedEpisode) -> float:
    if episode.reward is None:
        raise ValueError(f"expected a reward of every episode where rows are weighted, got none ({episode.where})")
    return episode.reward


def _weight(weigh: Weight, number: int, rewards: Sequence[float], episode: RecordedEpisode) -> float:
    found = float(weigh(rewards[number], rewards))
    if not np.isfinite(found):
        raise ValueError(f"expected weights that are finite numbers, got {found} ({episode.where})")
    return found
