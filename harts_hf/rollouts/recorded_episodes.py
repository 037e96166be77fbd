"""Recorded trajectories as a trainer takes them: prompt, completion, mask and values of each, by group and episode."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harts_hf.errors import HartsWarning, RolloutFileError
from harts_hf.rollouts.fields import MAX_TOKEN_ID, shortened
from harts_hf.rollouts.files import read_rollout_file, read_rollout_rows
from harts_hf.rollouts.recorded import Rollout, RolloutFile, RolloutGroup
from harts_hf.rollouts.rows import rows_of_table

# Sampled log-probs are at most 0; those of low precision may be a little above.
LARGEST_LOG_PROB = 0.05
# No token of a lower one was ever sampled: servers write -9999 for what they do not know. The ratio to it would be
# more than float32 holds (e^88), and the gradient NaN.
SMALLEST_LOG_PROB = -80.0
# How many places a message names.
_MOST_NAMED = 3


@dataclass(frozen=True, eq=False, kw_only=True)
class RecordedSample:
    """One trajectory of ``P + C`` tokens, cut before the first token that the policy wrote.

    Attributes:
        token_ids: ``[P + C]`` int32, both parts at least one token.
        prompt_length: P.
        mask: ``[C]`` bool, the tokens that are trained.
        logprobs: ``[C]`` float64, NaN where unknown, or None.
        advantage: a float, or ``[C]`` float64, or None.
        where: its row, for messages.
    """

    token_ids: NDArray[np.int32]
    prompt_length: int
    mask: NDArray[np.bool_]
    logprobs: NDArray[np.float64] | None
    advantage: float | NDArray[np.float64] | None
    where: str

    @property
    def completion_length(self) -> int:
        """C."""
        return len(self.mask)


@dataclass(frozen=True, eq=False, kw_only=True)
class RecordedEpisode:
    """One rollout: its samples in the order of the file, and its reward, None where no row has one."""

    samples: tuple[RecordedSample, ...]
    reward: float | None
    where: str


@dataclass(frozen=True, eq=False, kw_only=True)
class RecordedGroup:
    """The rollouts of one prompt; ``name`` is unlike every other group's."""

    name: str
    episodes: tuple[RecordedEpisode, ...]

    @property
    def samples(self) -> Iterator[RecordedSample]:
        """Of all episodes."""
        return chain.from_iterable(episode.samples for episode in self.episodes)


def read_groups(
    source: Any, tokenizer: Any, *, format: str, samples_per: str, group_key: str | None
) -> list[RolloutGroup]:
    """The groups of a source; see :class:`~harts_hf.rollouts.recorded_rollouts.RecordedRollouts`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: something else than a source; a row that its form does not allow.

    Warns:
        HartsWarning: no row says its group, and a key may; what the reader warns of.
    """
    options: dict[str, Any] = {"format": format, "samples_per": samples_per, "group_key": group_key}
    if isinstance(source, str | PathLike):
        file = read_rollout_file(Path(source), tokenizer, **options)
        if file.likely_group_keys:
            warnings.warn(HartsWarning(f"{source}: {file.group_hint} (in Python group_key=)"), stacklevel=3)
        return file.groups
    if isinstance(source, RolloutFile):
        return source.groups
    if hasattr(source, "with_format"):  # of `datasets`; a format could make its rows anything
        return read_rollout_rows(rows_of_table(source.with_format(None)), tokenizer, **options).groups
    if isinstance(source, Mapping) or not isinstance(source, Iterable):
        raise ValueError(
            "expected a path, several paths, a dataset, or an iterable of rows, Rollouts or RolloutGroups, got "
            f"{shortened(source)}"
        )
    entries = iter(source)
    first = next(entries, None)
    kind = next((kind for kind in (str | PathLike, RolloutGroup, Rollout) if isinstance(first, kind)), None)
    if kind is None and not isinstance(first, Mapping | list):
        raise ValueError(f"expected at least one path, row, Rollout or RolloutGroup, got {shortened(first)}")
    every = chain([first], entries)
    if kind is None:
        return read_rollout_rows(every, tokenizer, **options).groups
    found = list(every)
    if not all(isinstance(entry, kind) for entry in found):
        other = next(entry for entry in found if not isinstance(entry, kind))
        raise ValueError(f"expected entries of one kind, as the first, got {shortened(other)}")
    if kind is RolloutGroup:
        return found
    if kind is Rollout:
        return [RolloutGroup(name="rollouts", rollouts=tuple(found))]
    files = [read_rollout_file(Path(path), tokenizer, **options).groups for path in found]
    return _apart([Path(path) for path in found], files)


def _apart(paths: Sequence[Path], files: Sequence[list[RolloutGroup]]) -> list[RolloutGroup]:
    """Groups of several files: those of one name in two files are two groups, and their files' names tell them."""
    files_of: dict[str, set[int]] = {}
    for number, groups in enumerate(files):
        for group in groups:
            files_of.setdefault(group.name, set()).add(number)
    found = []
    for path, groups in zip(paths, files, strict=True):
        for group in groups:
            name = group.name if len(files_of[group.name]) == 1 else f"{path}: {group.name}"
            found.append(RolloutGroup(name=name, rollouts=group.rollouts, shape=group.shape))
    return found


def recorded_groups(groups: Sequence[RolloutGroup]) -> dict[str, RecordedGroup]:
    """The groups by name, ready to be played back.

    Raises:
        RolloutFileError: shapes; two groups of one name; rows without tokens to train on, or that do not say which
            those are; rewards that differ within an episode; log-probs above 0, or lower than any that is sampled; of
            rollouts that were made by hand also lists of other lengths than the tokens, and numbers that no file may
            hold.
    """
    found: dict[str, RecordedGroup] = {}
    if not groups:
        raise RolloutFileError("expected at least one group of rollouts, got none")
    for group in groups:
        if not group.rollouts:
            raise RolloutFileError(f"expected groups of at least one rollout, got none in {group.name!r}")
        if group.shape is not None or any(rollout.token_ids is None for rollout in group.rollouts):
            raise RolloutFileError(
                f"expected rollouts with token ids, got a shape without content (group {group.name})"
            )
        if group.name in found:
            raise RolloutFileError(f"expected groups of different names, got {group.name!r} twice")
        found[group.name] = RecordedGroup(name=group.name, episodes=tuple(_episodes(group)))
    unmasked = [
        _place(group, number)
        for group in groups
        for number, rollout in enumerate(group.rollouts)
        if rollout.loss_mask is None
    ]
    if unmasked:
        raise RolloutFileError(
            "expected every row to say which tokens the policy wrote (loss_mask; conversations do with "
            f"samples_per='turn'), got none in {named(unmasked)}"
        )
    return found


def _episodes(group: RolloutGroup) -> Iterator[RecordedEpisode]:
    rows: dict[Any, list[int]] = {}
    for number, rollout in enumerate(group.rollouts):
        # A row without an episode is a rollout of its own; no name of an episode is a tuple.
        rows.setdefault((number,) if rollout.episode is None else rollout.episode, []).append(number)
    for numbers in rows.values():
        where = _place(group, *numbers)
        rewards = {reward for number in numbers if (reward := group.rollouts[number].reward) is not None}
        if len(rewards) > 1:
            raise RolloutFileError(f"expected one reward per episode, got {sorted(rewards)[:2]} ({where})")
        samples = tuple(_sample(group.rollouts[number], _place(group, number)) for number in numbers)
        yield RecordedEpisode(samples=samples, reward=next(iter(rewards), None), where=where)


def _sample(rollout: Rollout, where: str) -> RecordedSample:
    _check_made_by_hand(rollout, where)
    ids = np.asarray(rollout.token_ids).astype(np.int32)
    if len(ids) < 2:
        raise RolloutFileError(f"expected trajectories of at least two tokens, got {len(ids)} ({where})")
    mask = np.zeros(len(ids), np.bool_) if rollout.loss_mask is None else np.asarray(rollout.loss_mask, np.bool_)
    # Nothing predicts the first token. Where nothing is trained, the last token stands for a completion.
    start = max(1, int(mask.argmax()) if mask.any() else len(ids) - 1)
    logprobs, advantage = rollout.old_logprobs, rollout.advantage
    if logprobs is not None:
        logprobs = np.asarray(logprobs, np.float64)[start:]
        above = np.flatnonzero(mask[start:] & (logprobs > LARGEST_LOG_PROB))
        below = np.flatnonzero(mask[start:] & (logprobs < SMALLEST_LOG_PROB))
        for places, limit in (
            (above, "at most 0"),
            (below, f"at least {SMALLEST_LOG_PROB:g} (null where they are not known)"),
        ):
            if len(places):
                place = int(places[0])
                raise RolloutFileError(
                    f"expected log-probs of {limit}, got {logprobs[place]} at position {start + place} ({where})"
                )
    return RecordedSample(
        token_ids=ids,
        prompt_length=start,
        mask=mask[start:].copy(),
        logprobs=logprobs,
        advantage=np.asarray(advantage, np.float64)[start:] if np.ndim(advantage) else advantage,  # type: ignore[arg-type]
        where=where,
    )


def _check_made_by_hand(rollout: Rollout, where: str) -> None:
    """Holds a rollout to what readers hold the rows of files to: ``Rollout`` itself checks nothing."""
    ids = np.asarray(rollout.token_ids)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise RolloutFileError(f"expected token_ids to be a list of integers, got {shortened(ids.tolist())} ({where})")
    wrong = ids[(ids < 0) | (ids > MAX_TOKEN_ID)]
    if len(wrong):
        raise RolloutFileError(f"expected token ids in [0, {MAX_TOKEN_ID}], got {wrong[0]} ({where})")
    for name in ("loss_mask", "old_logprobs", "advantage"):
        value = getattr(rollout, name)
        if isinstance(value, np.ndarray | Sequence) and np.shape(value) != ids.shape:
            raise RolloutFileError(f"expected {name} of {len(ids)} values, one per token, got {len(value)} ({where})")
    for name in ("reward", "advantage"):
        value = getattr(rollout, name)
        if value is not None and not np.isfinite(np.asarray(value, np.float64)).all():
            raise RolloutFileError(f"expected {name} to be finite, got {shortened(value)} ({where})")


def _place(group: RolloutGroup, *numbers: int) -> str:
    shown = ", ".join(str(number + 1) for number in numbers[:_MOST_NAMED])
    more = ", ..." if len(numbers) > _MOST_NAMED else ""
    return f"row{'s' if len(numbers) > 1 else ''} {shown}{more} of group {group.name!r}"


def named(places: Sequence[str]) -> str:
    """The first of some places, and how many others there are."""
    more = len(places) - _MOST_NAMED
    return "; ".join(places[:_MOST_NAMED]) + (f" and {more:,} more" if more > 0 else "")
