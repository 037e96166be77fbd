"""A rollout file while its rows are read: which form it has, whose group a row is, which keys nobody reads."""

import difflib
import warnings
from collections import Counter
from collections.abc import Mapping
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harts_hf.errors import HartsWarning, RolloutFileError
from harts_hf.rollouts import fields
from harts_hf.rollouts.group_keys import GroupKeys
from harts_hf.rollouts.readers import SHAPE_KEYS, Form, form_of_name, recognise
from harts_hf.rollouts.readers.conversation import Conversation, Thread, keys_of
from harts_hf.rollouts.readers.messages import read as read_messages
from harts_hf.rollouts.readers.samples import LOST_THOUGHTS, MEDIA, Sampler
from harts_hf.rollouts.recorded import Rollout, RolloutFile, RolloutGroup
from harts_hf.rollouts.rows import name_without_suffixes
from harts_hf.rollouts.shapes import shape_group

# Keys of our own rollout files with a value per token; advantages may be one number, too.
_PER_TOKEN = ("loss_mask", "old_logprobs")
_PER_ROW = (*_PER_TOKEN, "advantage", "token_ids")


class Reading:
    """A file while its rows are read; the arguments are those of :func:`~harts_hf.rollouts.files.read_rollout_file`.

    Raises:
        ValueError: no such form, or nothing that samples can be per.
    """

    def __init__(self, path: Path, tokenizer: Any, format: str, samples_per: str, group_key: str | None) -> None:
        self._path = path
        self._form: Form | None = None if format == "auto" else form_of_name(format)
        self._samples_per = samples_per
        self._group_key = group_key
        self._group_keys = GroupKeys()
        self._sampler = Sampler(tokenizer, samples_per)
        self._rollouts: dict[str, list[Rollout]] = {}
        self._shapes: list[RolloutGroup] = []
        self._has_groups: bool | None = None
        self._episodes = count()
        self._ignored: Counter[str] = Counter()
        self._where: str | None = None

    def add(self, row: Any, where: str) -> None:
        """Reads a row.

        Args:
            row: its values.
            where: it stands, such as ``line 3``.

        Raises:
            ValueError: it is not what its form says.
        """
        self._where = where
        if self._form is None:
            self._form = recognise(row)
        if isinstance(row, dict):
            self._look_at_keys(row)
        if isinstance(row, dict) and "parent" in row and self._form.name in ("rollouts", "messages", "shapes"):
            self._shapes.append(shape_group(row, self._group(row.get("group"), row)))
        elif self._form.name == "shapes":
            raise ValueError("expected rollouts only or shapes only, got both in one file")
        elif self._form.name == "rollouts" or self._is_own(row):
            self._add_rollout(row)
        else:
            assert self._form.read is not None
            for conversation in self._form.read(row):
                self._add_conversation(conversation, row)
        if self._shapes and self._rollouts:
            raise ValueError("expected rollouts only or shapes only, got both in one file")

    def result(self) -> RolloutFile:
        """What was read.

        Raises:
            RolloutFileError: nothing was.
        """
        if self._form is None or not (self._shapes or self._rollouts):
            what = "an empty file" if self._form is None else f"no conversation ({self._form.name})"
            raise RolloutFileError(f"{self._path}: expected at least one trajectory, got {what}")
        likely = {} if self._shapes or self._has_groups else self._group_keys.likely()
        ignored = ", ".join(sorted(self._ignored.keys() - likely))  # the hint of the file names those
        if ignored:
            warnings.warn(HartsWarning(f"{self._path}: keys that are not read: {ignored}"), stacklevel=4)
        rollouts = chain(*self._rollouts.values(), *(group.rollouts for group in self._shapes))
        # Nothing predicts the first token.
        if all(one.loss_mask is not None and not one.loss_mask[1:].any() for one in rollouts):
            warnings.warn(
                HartsWarning(
                    f"{self._path}: nothing of it would be trained: no row has a token that the policy wrote "
                    "(loss_mask; of conversations the assistant's turns, of shapes trained)"
                ),
                stacklevel=4,
            )
        tally = self._sampler.tally
        lost = tally.notes[LOST_THOUGHTS]
        if lost:
            warnings.warn(
                HartsWarning(
                    f"{self._path}: {lost:,} turns have thoughts that the chat template does not write; they are not "
                    "in the samples"
                ),
                stacklevel=4,
            )
        if tally.notes[MEDIA]:
            warnings.warn(
                HartsWarning(
                    f"{self._path}: {tally.notes[MEDIA]:,} messages have images, audio or files; samples hold what "
                    "the chat template writes for them (a placeholder), which is trained on as text"
                ),
                stacklevel=4,
            )
        return RolloutFile(
            groups=self._shapes or [RolloutGroup(name=n, rollouts=tuple(rows)) for n, rows in self._rollouts.items()],
            form=self._form.name,
            num_conversations=tally.conversations,
            samples_per=self._samples_per,
            notes={note: number for note, number in tally.notes.items() if number},
            names_groups=bool(self._shapes) or self._has_groups is not False,
            likely_group_keys=likely,
        )

    def _is_own(self, row: Any) -> bool:
        """Whether a row of messages is one of our rollout files: those may say things of each token."""
        assert self._form is not None
        if not isinstance(row, dict) or self._form.name not in ("messages", "anthropic"):
            return False
        return "messages" not in row or not row.keys().isdisjoint(_PER_ROW)

    def _look_at_keys(self, row: Mapping[str, Any]) -> None:
        """Notes keys that nobody reads.

        Raises:
            ValueError: one that looks like a slip for a key of our own files that the row does not have.
        """
        assert self._form is not None
        own = self._form.name in ("rollouts", "shapes")
        keys = SHAPE_KEYS if own and "parent" in row else self._form.keys
        if self._is_own(row):
            keys = (*keys, *_PER_ROW)
        group_key = (self._group_key or "").split(".")[0]
        for key in row.keys() - {*keys, *self._form.ignored, group_key}:
            slips = difflib.get_close_matches(key, [k for k in keys if k not in row], n=1, cutoff=0.85)
            if own and slips:
                raise ValueError(f"unknown key {key!r}; known are {', '.join(keys)}: is it meant to be {slips[0]!r}?")
            self._ignored[fields.shortened(key)[1:-1]] += 1

    def _add_rollout(self, row: Any) -> None:
        if not isinstance(row, dict) or ("token_ids" in row) == ("messages" in row):
            raise ValueError("expected either token_ids or messages")
        if "messages" in row:
            (conversation,) = read_messages(row)
            if self._is_one_sample(row, conversation):
                tokens, mask = self._sampler.whole(conversation)
                self._group_keys.add(row)
                self._append(row, row, self._rollout(row, tokens.tolist(), mask, self._episode(row)))
            else:
                self._add_conversation(conversation, row)
        else:
            episode = None if row.get("episode") is None else self._episode(row)
            self._group_keys.add(row)
            self._append(row, row, self._rollout(row, row["token_ids"], None, episode))

    def _rollout(
        self, row: Mapping[str, Any], tokens: Any, template_mask: NDArray[np.bool_] | None, episode: str | int | None
    ) -> Rollout:
        token_ids = fields.token_ids(tokens)
        size = len(token_ids)
        advantage, logprobs, mask = (row.get(key) for key in ("advantage", "old_logprobs", "loss_mask"))
        if isinstance(advantage, list):
            advantage = fields.floats("advantage", advantage, size)
        elif advantage is not None:
            advantage = fields.number("advantage", advantage)
        return Rollout(
            token_ids=token_ids,
            loss_mask=template_mask if mask is None else fields.mask(mask, size),
            advantage=advantage,
            reward=None if row.get("reward") is None else fields.number("reward", row["reward"]),
            old_logprobs=None if logprobs is None else fields.log_probs("old_logprobs", logprobs, size),
            episode=episode,
            where=self._where,
        )

    def _is_one_sample(self, row: Mapping[str, Any], conversation: Conversation) -> bool:
        per_token = not row.keys().isdisjoint(_PER_TOKEN) or isinstance(row.get("advantage"), list)
        if per_token and not (len(conversation.threads) == 1 and isinstance(conversation.threads[0], Thread)):
            raise ValueError("expected values per token beside one list of messages, got a list per request")
        return per_token

    def _add_conversation(self, conversation: Conversation, row: Any) -> None:
        self._group_keys.add(conversation.source, row)
        episode = self._episode(row if isinstance(row, dict) else {})
        advantage = row.get("advantage") if isinstance(row, dict) else None
        for token_ids, mask in self._sampler.samples(conversation):
            rollout = Rollout(
                token_ids=fields.token_ids(token_ids.tolist()),
                loss_mask=mask,
                advantage=None if advantage is None else fields.number("advantage", advantage),
                reward=conversation.reward,
                episode=episode,
                where=self._where,
            )
            self._append(conversation.source, row, rollout, conversation.group)

    def _append(self, source: Mapping[str, Any], row: Any, rollout: Rollout, group: Any = None) -> None:
        own = row.get("group") if isinstance(row, dict) and group is None else group
        self._rollouts.setdefault(self._group(own, source, row), []).append(rollout)

    def _group(self, group: Any, *sources: Any) -> str:
        """The name of a row's group: of the key that was asked for, of its own, or the file's."""
        if self._group_key is not None:
            found = [value for source in sources if (value := _at_key(source, self._group_key)) is not None]
            if not found:
                own = "; rows say their group by the key group: leave the group key out" if group is not None else ""
                raise ValueError(
                    f"expected the group key {self._group_key!r}, got none; keys are {keys_of(sources[-1])}{own}"
                )
            group = found[0]
        has_group = group is not None
        if self._has_groups is None:
            self._has_groups = has_group
        if has_group != self._has_groups and has_group:
            raise ValueError(f"expected no group, as in the rows before, got {fields.shortened(group)}")
        if not self._has_groups:
            return name_without_suffixes(self._path)
        if isinstance(group, bool) or not isinstance(group, str | int):
            raise ValueError(f"expected group to be a string or an integer, got {fields.shortened(group)}")
        return str(group)

    def _episode(self, row: Mapping[str, Any]) -> str | int:
        number = next(self._episodes)
        given = row.get("episode")
        if given is None:
            return number
        if isinstance(given, bool) or not isinstance(given, str | int):
            raise ValueError(f"expected episode to be a string or an integer, got {fields.shortened(given)}")
        return given


def _at_key(source: Any, key: str) -> Any:
    """The value at a key, or at keys of nested objects with dots between them; None where there is none."""
    if not isinstance(source, Mapping):
        return None
    if key in source:
        return source[key]
    first, _, rest = key.partition(".")
    return _at_key(source.get(first), rest) if rest else None
