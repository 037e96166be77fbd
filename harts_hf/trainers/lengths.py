"""Lengths that TRL logs, of rollouts that have several samples."""

from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object

from harts_hf.rollouts.episodes import Episodes


def log_lengths(trainer: Any, rows: dict[str, Any], episodes: Episodes) -> None:
    """Replaces TRL's ``completions/*`` (of last samples) by those of episodes, and adds those of samples.

    Lengths count the tokens that are trained; an episode without a sample has length 0 and no sample, and one that
    stands for no rollout is left out. An episode has terminated if its last sample ended with an end token.
    ``num_tokens`` counts the prompts and trained tokens of all samples. Collectives where there are several ranks.
    """
    mode = "train" if trainer.model.training else "eval"
    metrics, accelerator = trainer._metrics[mode], trainer.accelerator
    masks = rows.get("env_mask") or [[1] * len(ids) for ids in rows["completion_ids"]]
    lengths = np.array([sum(mask) for mask in masks])
    read = lengths + np.array([len(ids) for ids in rows["prompt_ids"]])
    ends = (*trainer.eos_token_ids, trainer._tokenizer.pad_token_id)
    last = episodes.last_rows
    samples = lengths[~episodes.is_empty[episodes.index]].tolist()
    counts = np.where(episodes.is_empty, 0, episodes.counts)
    of_episodes = [
        (int(length), rows["completion_ids"][row][-1] in ends and not is_empty, int(count))
        for length, row, count, is_empty, is_absent in zip(
            np.bincount(episodes.index, weights=lengths),
            last,
            counts,
            episodes.is_empty,
            episodes.is_absent,
            strict=True,
        )
        if not is_absent
    ]
    if mode == "train":
        more = torch.tensor([int(read.sum() - read[last].sum() - episodes.is_absent.sum())], device=accelerator.device)
        trainer.state.num_input_tokens_seen += accelerator.gather(more).sum().item()
    metrics["num_tokens"] = [trainer.state.num_input_tokens_seen]

    several = accelerator.num_processes > 1
    length, ended, count = np.array((gather_object(of_episodes) if several else of_episodes) or [(0, 0, 0)]).T
    terminated = length[ended == 1] if ended.any() else np.zeros(1)
    for name, values in (("", length), ("terminated_", terminated)):
        for kind, number in _statistics(values).items():
            metrics[f"completions/{kind}_{name}length"][-1] = number
    of_samples = np.array((gather_object(samples) if several else samples) or [0])
    for kind, number in _statistics(of_samples).items():
        metrics[f"completions/sample/{kind}_length"].append(number)
    metrics["completions/samples_per_episode"].append(float(count.mean()))


def _statistics(values: np.ndarray) -> dict[str, float]:
    mean = torch.from_numpy(values).float().mean().item()  # in float32, as TRL's
    return {"mean": mean, "min": float(values.min()), "max": float(values.max())}
