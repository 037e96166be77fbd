"""Recorded rollouts held to a trainer's settings before anything is trained: messages have the numbers that work."""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from harts_hf.rollouts.fields import shortened
from harts_hf.rollouts.recorded_episodes import named

if TYPE_CHECKING:
    from harts_hf.rollouts.recorded_rollouts import RecordedRollouts


def check_arguments(recorded: "RecordedRollouts", args: Any, names: Collection[str] | None = None) -> None:
    """Checks sizes and lengths.

    Args:
        recorded: the rollouts.
        args: a trainer's.
        names: the groups that are trained; by default all.

    Raises:
        ValueError: see :meth:`RecordedRollouts.check`.
    """
    if getattr(args, "use_vllm", False):
        raise ValueError("expected use_vllm=False with recorded rollouts (nothing is sampled), got True")
    sizes = recorded.group_sizes
    _check_sizes(recorded, sizes if names is None else {name: sizes[name] for name in names}, args.num_generations)
    if args.num_generations and args.generation_batch_size:
        per_generation = args.generation_batch_size // args.num_generations
        groups = len(sizes if names is None else names)
        if per_generation > groups:
            raise ValueError(
                f"expected at most {groups} groups per generation, as many as are trained on, got {per_generation}: "
                f"generation_batch_size={args.generation_batch_size} (per_device_train_batch_size x processes x "
                f"steps_per_generation) / num_generations={args.num_generations}; with generation_batch_size="
                f"{args.num_generations} each generation takes one group"
            )
    limit = args.max_completion_length
    if recorded.too_long == "error" and limit is not None and recorded.max_completion_length > limit:
        longer = [
            f"{sample.where} ({sample.completion_length:,})"
            for group in recorded.groups.values()
            for sample in group.samples
            if sample.completion_length > limit
        ]
        raise ValueError(
            f"expected completions of at most max_completion_length={limit:,} tokens, got longer ones in "
            f"{named(longer)}: set max_completion_length={recorded.max_completion_length}, or too_long='truncate'"
        )


def check_trainer(recorded: "RecordedRollouts", trainer: Any) -> None:
    """Checks rollouts against a trainer.

    Raises:
        ValueError: see :meth:`RecordedRollouts.check_trainer`.
    """
    args = trainer.args
    trained_on = _names(recorded, trainer.train_dataset, "train_dataset")
    check_arguments(recorded, args, trained_on)
    evaluated = trainer.eval_dataset
    for dataset in evaluated.values() if isinstance(evaluated, dict) else [evaluated]:
        names = _names(recorded, dataset, "eval_dataset")
        if names is not None:
            sizes = {name: recorded.group_sizes[name] for name in names}
            _check_sizes(recorded, sizes, trainer.num_generations_eval, "num_generations_eval")
    if getattr(trainer, "tools", None):
        raise ValueError("expected no tools with recorded rollouts (nothing is sampled), got some")
    _check_vocabulary(recorded, trainer._tree.planner.vocab_size)
    if recorded.has_recorded_advantages:
        _check_advantages(recorded, trainer)
    elif "recorded_reward" in trainer.reward_func_names:
        _check_rewards(recorded)


def _check_sizes(
    recorded: "RecordedRollouts", sizes: dict[str, int], most: int | None, setting: str = "num_generations"
) -> None:
    larger = [f"{name!r} ({size})" for name, size in sizes.items() if most is not None and size > most]
    if larger and recorded.oversized == "error":
        largest = max(sizes.values())
        raise ValueError(
            f"expected groups of at most {setting}={most} episodes, got larger ones: {named(larger)}. Set "
            f"{setting}={largest} and a per_device_train_batch_size whose product with processes and "
            f"steps_per_generation is a multiple of it, such as {largest}; or oversized='subsample'"
        )


def _names(recorded: "RecordedRollouts", dataset: Any, what: str) -> list[str] | None:
    """The groups that a data set names; None where it cannot be asked."""
    if dataset is None or not hasattr(dataset, "__len__"):
        return None
    names = list(dict.fromkeys(map(str, dataset["prompt"])))
    unknown = [name for name in names if name not in recorded.groups]
    if unknown:
        raise ValueError(
            f"expected the prompts of {what} to be names of recorded groups (see dataset()), got "
            f"{', '.join(map(shortened, unknown[:3]))}"
        )
    return names


def _check_vocabulary(recorded: "RecordedRollouts", vocab_size: int | None) -> None:
    if vocab_size is None:
        return
    outside = [
        f"{sample.where} (token {sample.token_ids.max()})"
        for group in recorded.groups.values()
        for sample in group.samples
        if sample.token_ids.max() >= vocab_size
    ]
    if outside:
        raise ValueError(f"expected token ids below the model's {vocab_size:,}, got others in {named(outside)}")


def _check_advantages(recorded: "RecordedRollouts", trainer: Any) -> None:
    credit = getattr(trainer.args, "tree_credit", "trajectory")
    if credit != "trajectory":
        raise ValueError(
            f"expected tree_credit='trajectory' with recorded advantages, got {credit!r}: advantages='rewards' leaves "
            "them out"
        )
    if trainer._accepts_token_advantages:
        return
    several = [
        sample.where
        for group in recorded.groups.values()
        for sample in group.samples
        if isinstance(sample.advantage, np.ndarray) and len(np.unique(sample.advantage[sample.mask])) > 1
    ]
    if several:
        raise ValueError(
            f"expected one advantage per trajectory ({type(trainer).__name__} knows none per token), got several in "
            f"{named(several)}"
        )


def _check_rewards(recorded: "RecordedRollouts") -> None:
    episodes = [episode for group in recorded.groups.values() for episode in group.episodes]
    without = [episode.where for episode in episodes if episode.reward is None]
    if without:
        raise ValueError(f"expected a reward for every episode, got none in {named(without)}")
    if all(size == 1 for size in recorded.group_sizes.values()):
        raise ValueError(
            "expected groups of several episodes, whose rewards are compared, got one episode in each: group_key "
            "names the key of each row's group; rows with an advantage of their own need no group"
        )
