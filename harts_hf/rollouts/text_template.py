"""Chat templates of Transformers' tokenizers: turns are found in the rendered texts, histories tokenised once."""

import re
from typing import Any

import numpy as np

from harts_hf.rollouts.fields import shortened
from harts_hf.rollouts.lost import Message
from harts_hf.rollouts.segments import SegmentedTokenizer
from harts_hf.rollouts.templates import ChatTemplate, Sample, Tools
from harts_hf.tree import IntArray


class TextTemplate(ChatTemplate):
    """The template of a tokenizer of Transformers: texts are compared, and each piece of them is tokenised once.

    Args:
        tokenizer: the tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self._segments = SegmentedTokenizer(tokenizer)
        self._longest: tuple[str, IntArray] = ("", np.zeros(0, np.int64))

    def render(self, messages: list[Message], tools: Tools, *, for_answer: bool = False) -> str:
        """The conversation as text."""
        return self._tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=for_answer
        )

    def marked(self, messages: list[Message], tools: Tools) -> Sample:
        if self.marks_generations:
            return super().marked(messages, tools)
        return self._encode(self._whole(messages, tools)), None

    def conversation(self, messages: list[Message], tools: Tools, turns: list[int]) -> Sample:
        """The whole conversation; the mask is the template's own or, where it has none, shows where turns stand."""
        if self.marks_generations or not turns:
            return self.marked_turns(messages, tools, turns)
        text = self._whole(messages, tools)
        ids = self._encode(text)
        spans = self._spans(text, messages, tools, turns)
        if spans is None:
            return ids, None
        mask = np.zeros(len(ids), bool)
        for start, end in spans:
            mask[self._segments.tokens_before(text, start) : self._segments.tokens_before(text, end)] = True
        return ids, mask

    def turn(self, messages: list[Message], tools: Tools, index: int) -> Sample:
        before = self._before(messages, tools, index)
        text, start = self._turn(before, messages, tools, index)
        end = self._end(text, start)
        ids = self._encode(text[:end])
        mask = np.zeros(len(ids), bool)
        mask[self._segments.tokens_before(text[:end], start) :] = True
        return ids, mask

    def plain(self, prompt: str, completion: str) -> Sample:
        text = prompt + completion
        ids = self._encode(text)
        mask = np.zeros(len(ids), bool)
        mask[self._segments.tokens_before(text, len(prompt)) :] = True
        return ids, mask

    def is_exact(self) -> bool:
        """Compares the longest of the samples since the last call."""
        text, ids = self._longest
        self._longest = ("", np.zeros(0, np.int64))
        return self._segments.is_exact(text, ids)

    def _rendered(self, messages: list[Message], tools: Tools, number: int) -> str:
        """The text of the first messages."""
        try:
            return self.render(messages[:number], tools)
        except Exception as error:  # templates are programs: they raise what they like
            raise ValueError(f"the chat template failed at message {number}: {error}") from error

    def _whole(self, messages: list[Message], tools: Tools) -> str:
        """The text of a whole conversation: that of the check, if it was of these messages."""
        checked, text = self._prepared
        return text if checked is messages else self.render(messages, tools)

    def _encode(self, text: str) -> IntArray:
        try:
            ids = self._segments.encode(text)
        except (TypeError, UnicodeEncodeError) as error:  # tokenizers take no lone surrogates
            raise ValueError(f"expected messages of valid Unicode, got {shortened(_surrogate(text))}") from error
        if len(text) >= len(self._longest[0]):
            self._longest = (text, ids)
        return ids

    def _turn(self, before: str, messages: list[Message], tools: Tools, index: int) -> tuple[str, int]:
        """The text of a turn's sample, and where the turn begins in it."""
        text = self._rendered(messages, tools, index + 1)
        if text.startswith(before):
            return text, len(before)
        history = self._rendered(messages, tools, index)
        if before == history:  # no prompt for an answer: nothing else shows where it begins
            return text, self._cut(text, _common_prefix(text, before))
        openings = self._openings(before[len(history) :]) if before.startswith(history) else []
        if text.startswith(history):
            # The answer goes on in another way than the prompt for it, which may open a thought, say.
            for opening in openings:
                if text.startswith(opening, len(history)):
                    return text, len(history) + len(opening)
        # The template writes the history in another way once the turn is there: the agent sent it as it was before.
        for opening in openings:
            place = text.rfind(opening)
            if place >= 0:
                return history + text[place:], len(history) + len(opening)
        raise ValueError(
            f"message {index + 1}: expected a chat template that shows where a turn begins, got one that renders the "
            "messages before it in another way once it is there"
        )

    def _cut(self, text: str, limit: int) -> int:
        """The last end of a special token up to ``limit``; ``limit`` where there is none."""
        if self._segments.special is None:
            return limit
        ends = [match.end() for match in self._segments.special.finditer(text, 0, limit)]
        return ends[-1] if ends else limit

    def _end(self, text: str, start: int) -> int:
        """Where a turn that begins at ``start`` ends: after its end token, less what the template writes after it."""
        if self._segments.special is not None:
            ends = [match.end() for match in self._segments.special.finditer(text, start)]
            if ends and not text[ends[-1] :].strip():
                return ends[-1]
        return len(text)

    def _openings(self, prompt: str) -> list[str]:
        """What a turn may begin with: the prompt for it, or its start up to a special token or the end of a line."""
        pattern = self._segments.special.pattern + "|\n" if self._segments.special is not None else "\n"
        ends = [len(prompt), *(match.end() for match in re.finditer(pattern, prompt))]
        return [prompt[:end] for end in sorted(set(ends), reverse=True) if prompt[:end].strip()]

    def _spans(
        self, text: str, messages: list[Message], tools: Tools, turns: list[int]
    ) -> list[tuple[int, int]] | None:
        """Where the turns stand in the text of the whole conversation; None where that cannot be told."""
        first = turns[0]
        before, history = self._before(messages, tools, first), self._rendered(messages, tools, first)
        with_first = self._rendered(messages, tools, first + 1)
        end = self._end(with_first, len(history))
        special = self._segments.special
        closings = [] if special is None else [m.group() for m in special.finditer(with_first, len(history), end)]
        if not before.startswith(history) or not closings or not with_first[:end].endswith(closings[-1]):
            return None
        prompt, answers = before[len(history) :], [i for i, m in enumerate(messages) if m.get("role") == "assistant"]
        for opening in self._openings(prompt):
            places = [match.start() for match in re.finditer(re.escape(opening), text)]
            if len(places) != len(answers):
                continue
            spans = []
            for answer, place in zip(answers, places, strict=True):
                start = place + len(prompt if text.startswith(prompt, place) else opening)
                close = text.find(closings[-1], start)
                if answer in turns and close < 0:
                    return None
                if answer in turns:
                    spans.append((start, close + len(closings[-1])))
            return spans
        return None


def _surrogate(text: str) -> str:
    return next((character for character in text if "\ud800" <= character <= "\udfff"), "")


def _common_prefix(left: str, right: str) -> int:
    """Length of the longest common prefix, by bisection: comparing slices is quick, comparing characters is not."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left.startswith(right[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low
