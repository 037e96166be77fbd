"""Conversations as samples: one per turn, as an agent sent them, or one per conversation."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from harts_hf.rollouts.lost import Message
from harts_hf.rollouts.messages import chat_template
from harts_hf.rollouts.readers.conversation import Conversation, PlainText, Thread
from harts_hf.rollouts.templates import ChatTemplate, Sample, Tools

SAMPLES_PER = ("turn", "conversation")
LOST_THOUGHTS = "turns whose thoughts the chat template does not write"
MEDIA = "messages with images, audio or files, of which samples hold what the chat template writes"
_MEDIA = ("image", "audio", "video", "file")
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")


@dataclass(kw_only=True)
class Tally:
    """What a file's conversations came to.

    Attributes:
        conversations: how many were read.
        samples: how many came of them.
        notes: what of them did not, by name, and how often.
    """

    conversations: int = 0
    samples: int = 0
    notes: Counter[str] = field(default_factory=Counter)


class Sampler:
    """Makes samples of conversations, and counts.

    Args:
        tokenizer: anything with Transformers' ``apply_chat_template``; None if no row needs one.
        samples_per: ``"turn"`` (each turn with the messages before it) or ``"conversation"``.

    Attributes:
        tally: what came of the conversations so far.

    Raises:
        ValueError: another ``samples_per``.
    """

    def __init__(self, tokenizer: Any, samples_per: str = "turn") -> None:
        if samples_per not in SAMPLES_PER:
            raise ValueError(f"expected samples per {' or '.join(SAMPLES_PER)}, got {samples_per!r}")
        self._tokenizer = tokenizer
        self._per_turn = samples_per == "turn"
        self._template: ChatTemplate | None = None
        self.tally = Tally()

    @property
    def template(self) -> ChatTemplate:
        """The tokenizer's; asking for it needs a tokenizer."""
        if self._template is None:
            self._template = chat_template(self._tokenizer)
        return self._template

    def whole(self, conversation: Conversation) -> Sample:
        """The sample of a row that says things of each token: its one conversation, whole."""
        (thread,) = conversation.threads
        assert isinstance(thread, Thread)
        self._count_media(thread)
        messages = self.template.prepared(thread.messages, thread.tools)
        return self.template.marked_turns(messages, thread.tools, thread.turns)

    def samples(self, conversation: Conversation) -> list[Sample]:
        """The samples of a conversation, in the order of its turns.

        Raises:
            ValueError: no tokenizer; messages that the template does not take or that leave no token.
        """
        found: list[Sample] = []
        for number, thread in enumerate(conversation.threads, 1):
            try:
                samples = list(self._samples(thread))
                if not self.template.is_exact():  # from here on whole texts are tokenised
                    samples = list(self._samples(thread))
                    self.tally.notes["texts tokenised whole: this tokenizer's pieces depend on their neighbours"] += 1
            except ValueError as error:
                if len(conversation.threads) == 1:
                    raise
                raise ValueError(f"request {number}: {error}") from error
            found += samples
            if isinstance(thread, Thread):
                self._count(thread)
        self.tally.conversations += 1
        self.tally.samples += len(found)
        self.tally.notes.update({f"events left out: {name}": count for name, count in conversation.skipped.items()})
        return found

    def _samples(self, thread: Thread | PlainText) -> Iterator[Sample]:
        if isinstance(thread, PlainText):
            yield self.template.plain(thread.prompt, thread.completion)
            return
        messages, tools, turns = self.template.prepared(thread.messages, thread.tools), thread.tools, thread.turns
        if self._per_turn and turns:
            for turn in turns:
                yield self.template.turn(messages, tools, turn)
            return
        ids, mask = self.template.conversation(messages, tools, turns)
        if not turns and mask is None:
            mask = ids < 0  # nothing
        elif mask is None:
            self.tally.notes["lists of messages in whose text the turns cannot be told: they have no mask"] += 1
        yield ids, mask

    def _count(self, thread: Thread) -> None:
        turns, notes = thread.turns, self.tally.notes
        if not turns:
            notes["conversations without a turn of the assistant: nothing of them is trained"] += 1
        elif self._per_turn:
            notes["messages after the last turn left out"] += len(thread.messages) - 1 - turns[-1]
        notes["answers of weight 0: context, not trained"] += sum(m.get("weight") == 0 for m in thread.messages)
        thoughts = sum(_has_thought(thread.messages[turn]) for turn in turns)
        if thoughts and not self._knows_thoughts(thread.tools):
            notes[LOST_THOUGHTS] += thoughts
        self._count_media(thread)

    def _count_media(self, thread: Thread) -> None:
        found = sum(_has_media(message) for message in thread.messages)
        if found:
            self.tally.notes[MEDIA] += found

    def _knows_thoughts(self, tools: Tools) -> bool:
        return self.template.knows_thoughts(tools)


def _has_thought(message: Message) -> bool:
    return any(isinstance(message.get(key), str) and message[key].strip() for key in _THOUGHTS)


def _has_media(message: Message) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(isinstance(block, dict) and _is_media(block) for block in content)


def _is_media(block: Message) -> bool:
    return str(block.get("type")).removeprefix("input_").startswith(_MEDIA)
