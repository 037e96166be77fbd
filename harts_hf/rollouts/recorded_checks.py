"""Recorded rollouts held to a trainer's settings before anything is trained: messages have the numbers that work."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from harts_hf.rollouts.fields import shortened
from harts_hf.rollouts.recorded_episodes import RecordedGroup, RecordedSample, named

if TYPE_CHECKING:
    from harts_hf.rollouts.recorded_rollouts import RecordedRollouts


def check_logprobs(groups: Iterable[RecordedGroup]) -> None:
    """Raises ValueError for samples without log-probs, but those of which nothing is trained."""
    without = [sample.where for sample in _samples(groups) if sample.logprobs is None and sample.mask.any()]
    if without:
        raise ValueError(
            f"expected old_logprobs in every row with logprobs='recorded', got none in {named(without)}: "
            "logprobs='rescored' compares with the policy's own"
        )


def uses_advantages(groups: Iterable[RecordedGroup], choice: str) -> bool:
    """Whether advantages are the rows' own.

    Raises:
        ValueError: some are missing.
    """
    samples = list(_samples(groups))
    has_any = any(sample.advantage is not None for sample in samples)
    if choice == "rewards" or not (has_any or choice == "recorded"):
        return False
    without = [sample.where for sample in samples if sample.advantage is None and sample.mask.any()]
    if without:
        raise ValueError(
            f"expected an advantage in every row, got none in {named(without)}: advantages='rewards' computes all of "
            "them from rewards"
        )
    return True


def check_arguments(recorded: "RecordedRollouts", args: Any) -> None:
    """Checks all groups against a trainer's arguments.

    Raises:
        ValueError: see :meth:`RecordedRollouts.check`.
    """
    if getattr(args, "use_vllm", False):
        raise ValueError("expected use_vllm=False with recorded rollouts (nothing is sampled), got True")
    groups = list(recorded.groups.values())
    _check_sizes(recorded, groups, args.num_generations, "num_generations")
    _check_batches(args, len(groups))
    _check_lengths(recorded, groups, args.max_completion_length)


def check_trainer(recorded: "RecordedRollouts", trainer: Any, *, with_rewards: bool) -> None:
    """Checks the groups that a trainer's data sets name.

    Args:
        recorded: the rollouts.
        trainer: the tree trainer.
        with_rewards: whether it rewards by the recorded rewards.

    Raises:
        ValueError: see :meth:`RecordedRollouts.check_trainer`.
    """
    args = trainer.args
    if getattr(args, "use_vllm", False) or getattr(trainer, "tools", None):
        raise ValueError("expected neither use_vllm nor tools with recorded rollouts (nothing is sampled), got one")
    trained_on = _groups(recorded, trainer.train_dataset, "train_dataset")
    evaluations = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {"": trainer.eval_dataset}
    evaluated_on = [
        group
        for dataset in evaluations.values()
        if dataset is not None
        for group in _groups(recorded, dataset, "eval_dataset")
    ]
    _check_sizes(recorded, trained_on, args.num_generations, "num_generations")
    _check_sizes(recorded, evaluated_on, trainer.num_generations_eval, "num_generations_eval")
    if hasattr(trainer.train_dataset, "__len__"):
        _check_batches(args, len(trainer.train_dataset))
    used = list({group.name: group for group in (*trained_on, *evaluated_on)}.values())
    _check_lengths(recorded, used, args.max_completion_length)
    _check_vocabulary(used, trainer.tree_policy.planner.vocab_size)
    if recorded.has_recorded_advantages:
        _check_advantages(used, trainer)
    elif with_rewards:
        _check_rewards(used)


def _groups(recorded: "RecordedRollouts", dataset: Any, what: str) -> list[RecordedGroup]:
    """The groups that a data set names; all where it cannot be asked."""
    if dataset is None or not hasattr(dataset, "__len__"):
        return list(recorded.groups.values())
    names = list(dict.fromkeys(map(str, dataset["prompt"])))
    unknown = [shortened(name) for name in names if name not in recorded.groups]
    if unknown:
        raise ValueError(
            f"expected the prompts of {what} to be names of recorded groups (see dataset()), got {named(unknown)}"
        )
    return [recorded.groups[name] for name in names]


def _check_sizes(
    recorded: "RecordedRollouts", groups: Sequence[RecordedGroup], most: int | None, setting: str
) -> None:
    sizes = {group.name: len(group.episodes) for group in groups}
    larger = [f"{name!r} ({size})" for name, size in sizes.items() if most is not None and size > most]
    if larger and recorded.oversized == "error":
        largest = max(sizes.values())
        whole = "" if len(recorded.groups) > 1 else "; if this one group is a whole file: group_key, a key of its rows"
        raise ValueError(
            f"expected groups of at most {setting}={most} episodes, got larger ones: {named(larger)}. Set "
            f"{setting}={largest} and a per_device_train_batch_size whose product with processes and "
            f"steps_per_generation is a multiple of it, such as {largest}; or oversized='subsample'{whole}"
        )


def _check_batches(args: Any, num_groups: int) -> None:
    if not args.num_generations or not args.generation_batch_size:
        return
    per_generation = args.generation_batch_size // args.num_generations
    if per_generation > num_groups:
        raise ValueError(
            f"expected at most {num_groups} groups per generation, as many as are trained on, got {per_generation}: "
            f"generation_batch_size={args.generation_batch_size} (per_device_train_batch_size x processes x "
            f"steps_per_generation) / num_generations={args.num_generations}; with generation_batch_size="
            f"{args.num_generations} each generation takes one group"
        )


def _check_lengths(recorded: "RecordedRollouts", groups: Sequence[RecordedGroup], limit: int | None) -> None:
    if limit is None or recorded.too_long != "error":
        return
    lengths = {sample.where: sample.completion_length for sample in _samples(groups)}
    longer = [f"{where} ({length:,})" for where, length in lengths.items() if length > limit]
    if longer:
        raise ValueError(
            f"expected completions of at most max_completion_length={limit:,} tokens, got longer ones in "
            f"{named(longer)}: set max_completion_length={max(lengths.values())}, or too_long='truncate'"
        )


def _check_vocabulary(groups: Sequence[RecordedGroup], vocab_size: int | None) -> None:
    if vocab_size is None:
        return
    largest = {sample.where: int(sample.token_ids.max()) for sample in _samples(groups)}
    outside = [f"{where} (token {token})" for where, token in largest.items() if token >= vocab_size]
    if outside:
        raise ValueError(f"expected token ids below the model's {vocab_size:,}, got others in {named(outside)}")


def _check_advantages(groups: Sequence[RecordedGroup], trainer: Any) -> None:
    credit = getattr(trainer.args, "tree_credit", "trajectory")
    if credit != "trajectory":
        raise ValueError(
            f"expected tree_credit='trajectory' with recorded advantages, got {credit!r}: advantages='rewards' leaves "
            "them out"
        )
    if trainer.accepts_token_advantages:
        return
    several = [
        sample.where
        for sample in _samples(groups)
        if isinstance(sample.advantage, np.ndarray) and len(np.unique(sample.advantage[sample.mask])) > 1
    ]
    if several:
        raise ValueError(
            f"expected one advantage per trajectory ({type(trainer).__name__} knows none per token), got several in "
            f"{named(several)}"
        )


def _check_rewards(groups: Sequence[RecordedGroup]) -> None:
    without = [episode.where for group in groups for episode in group.episodes if episode.reward is None]
    if without:
        raise ValueError(
            "expected a reward for every episode (the key reward of our own rows; docs/formats.md for other forms), "
            f"got none in {named(without)}"
        )
    if all(len(group.episodes) == 1 for group in groups):
        raise ValueError(
            "expected groups of several episodes, whose rewards are compared, got one episode in each: group_key "
            "names the key of each row's group; rows with an advantage of their own need no group"
        )


def _samples(groups: Iterable[RecordedGroup]) -> Iterable[RecordedSample]:
    return (sample for group in groups for sample in group.samples)
