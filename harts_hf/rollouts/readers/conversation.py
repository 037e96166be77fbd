"""What every reader makes of a file: conversations of messages as OpenAI's chat interface has them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harts_hf.rollouts import fields
from harts_hf.rollouts.fields import shortened

Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Thread:
    """A list of messages, and which of them the policy wrote.

    Attributes:
        messages: in OpenAI's form; the roles are those of the file.
        sampled: indices of the messages that were sampled in this thread; None for all of the role ``assistant``.
            Those with a ``weight`` of 0 are context either way.
        tools: their descriptions in OpenAI's form, or None.
    """

    messages: list[Message]
    sampled: frozenset[int] | None = None
    tools: list[dict[str, Any]] | None = None

    @property
    def turns(self) -> list[int]:
        """Indices of the sampled messages, ascending. What comes before any other message answers nothing."""
        return [
            index
            for index, message in enumerate(self.messages)
            if index > 0
            and message.get("role") == "assistant"
            and (self.sampled is None or index in self.sampled)
            and message.get("weight") != 0
        ]


@dataclass(frozen=True, kw_only=True)
class PlainText:
    """A prompt and what the policy made of it, both without a chat template.

    Attributes:
        prompt: the text before.
        completion: the sampled text.
    """

    prompt: str
    completion: str


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One rollout as a file has it: an episode.

    Attributes:
        threads: one where each request extends the one before; one per request where a file has them so.
        reward: of the whole rollout, or None.
        group: which task it is of, or None where the form does not say.
        source: the object that it was read from, for ``--group-key``.
        skipped: what of it is no message, by name, and how often.
    """

    threads: Sequence[Thread | PlainText]
    reward: float | None = None
    group: Any = None
    source: Mapping[str, Any] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)


def get(row: Mapping[str, Any], key: str, kind: type, what: str = "") -> Any:
    """``row[key]``, which has to be a ``kind``; None where it is null or absent.

    Raises:
        ValueError: it is something else.
    """
    value = row.get(key)
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"expected {what}{key} to be {_NAMES[kind]}, got {shortened(value)}")
    return value


def need(row: Mapping[str, Any], key: str, kind: type, what: str = "") -> Any:
    """:func:`get`, but it has to be there."""
    value = get(row, key, kind, what)
    if value is None:
        raise ValueError(f"expected {what}{key} to be {_NAMES[kind]}, got none; keys are {keys_of(row)}")
    return value


def objects(value: Any, what: str) -> list[dict[str, Any]]:
    """``value`` if it is a list of objects.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(value, list):
        raise ValueError(f"expected {what} to be a list of objects, got {shortened(value)}")
    for number, entry in enumerate(value, 1):
        if not isinstance(entry, dict):
            raise ValueError(f"expected {what} to be a list of objects, got {shortened(entry)} as number {number}")
    return value


def reward_of(row: Mapping[str, Any], key: str = "reward", what: str = "") -> float | None:
    """``row[key]`` as a finite number; None where it is null or absent."""
    value = row.get(key)
    return None if value is None else fields.number(f"{what}{key}", value)


def last_answer(messages: Sequence[Message]) -> frozenset[int]:
    """The index of the last message of the role ``assistant``: what a request and its answer were sampled for."""
    found = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    return frozenset(found[-1:])


def keys_of(row: Any) -> str:
    """The keys of an object, or what else it is, for a message."""
    if not isinstance(row, Mapping):
        return f"those of no object but a {type(row).__name__}"
    names = [shortened(key)[1:-1] if isinstance(key, str) else shortened(key) for key in row]
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "") or "none"


def joined(texts: Iterable[Any]) -> str | None:
    """The texts that say something, a line each; None if there is none."""
    return "\n".join(text for text in texts if isinstance(text, str) and text) or None


def strings_of(blocks: Any, key: str) -> list[str]:
    """The texts that a list of blocks has at a key; whatever else is among them is passed over."""
    entries = blocks if isinstance(blocks, list) else ()
    return [entry[key] for entry in entries if isinstance(entry, dict) and isinstance(entry.get(key), str)]


_NAMES: dict[type, str] = {list: "a list", dict: "an object", str: "a text"}
