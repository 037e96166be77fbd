"""Answers in the form of OpenAI's chat completions, whole or in chunks."""

import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from harts_hf.rollouts.fields import shortened

# Texts are streamed in pieces of about so many characters.
_CHUNK = 64


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call of a tool: its name, and its arguments as JSON text (or what the policy wrote in their place).

    Characters that UTF-8 lacks become "?", in messages too: a policy may write half of a surrogate pair.

    Raises:
        ValueError: one of them is no text.
    """

    name: str
    arguments: str

    def __post_init__(self) -> None:
        for key in ("name", "arguments"):
            object.__setattr__(self, key, _in_utf8(getattr(self, key), f"{key} of a ToolCall"))


@dataclass(frozen=True, kw_only=True)
class AssistantMessage:
    """What a turn of the policy says.

    Attributes:
        content: text for whoever asked.
        reasoning_content: its thinking, or None.
        tool_calls: calls of tools.

    Raises:
        ValueError: texts that are none, calls that are no :class:`ToolCall`.
    """

    content: str = ""
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "content", _in_utf8(self.content, "content of an AssistantMessage"))
        if self.reasoning_content is not None:
            thinking = _in_utf8(self.reasoning_content, "reasoning_content of an AssistantMessage")
            object.__setattr__(self, "reasoning_content", thinking)
        calls = self.tool_calls
        if not isinstance(calls, list | tuple) or not all(isinstance(call, ToolCall) for call in calls):
            raise ValueError(f"expected tool_calls of an AssistantMessage to be ToolCalls, got {shortened(calls)}")
        object.__setattr__(self, "tool_calls", tuple(calls))

    def without_format(self) -> tuple[Any, ...]:
        """The message less what its format may change: runs of white space, and the way arguments are written."""
        calls = tuple((call.name, _canonical(call.arguments)) for call in self.tool_calls)
        return _collapsed(self.content), _collapsed(self.reasoning_content or ""), calls


def _in_utf8(text: Any, what: str) -> str:
    if not isinstance(text, str):
        raise ValueError(f"expected {what} to be a text, got {shortened(text)}")
    return text.encode("utf-8", "replace").decode()


def _collapsed(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return _collapsed(arguments)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One of a request's answers.

    Attributes:
        message: what it says.
        finish_reason: as in OpenAI's interface.
        num_tokens: tokens that were sampled for it.
    """

    message: AssistantMessage
    finish_reason: Literal["stop", "length", "tool_calls"]
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A request's choices.

    Attributes:
        number: of the request in its episode, 0 the first. Ids are made of it, so that they are the same in every run.
        model: the policy's name.
        prompt_tokens: tokens of the history.
        choices: at least one.
    """

    number: int
    model: str
    prompt_tokens: int
    choices: Sequence[Choice]

    def body(self) -> dict[str, Any]:
        """The answer as one ``chat.completion``."""
        choices = [
            {
                "index": index,
                "message": self._message(index),
                "finish_reason": choice.finish_reason,
                "logprobs": None,
            }
            for index, choice in enumerate(self.choices)
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": self._usage()}

    def texts(self) -> Iterator[dict[str, Any]]:
        """The choices' messages as ``chat.completion.chunk`` objects."""
        for index in range(len(self.choices)):
            message = self._message(index)
            yield self._chunk(index, {"role": "assistant", "content": ""})
            for key in ("reasoning_content", "content"):
                for piece in _pieces(message.get(key) or ""):
                    yield self._chunk(index, {key: piece})
            for number, call in enumerate(message.get("tool_calls", ())):
                function = call["function"]
                head = {**call, "index": number, "function": {"name": function["name"], "arguments": ""}}
                yield self._chunk(index, {"tool_calls": [head]})
                for piece in _pieces(function["arguments"]):
                    yield self._chunk(index, {"tool_calls": [{"index": number, "function": {"arguments": piece}}]})

    def ends(self, *, include_usage: bool) -> Iterator[dict[str, Any]]:
        """The chunks that end the choices, and the usage."""
        for index, choice in enumerate(self.choices):
            yield self._chunk(index, {}, choice.finish_reason)
        if include_usage:
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage()}

    def _message(self, index: int) -> dict[str, Any]:
        said = self.choices[index].message
        message: dict[str, Any] = {"role": "assistant", "content": said.content}
        if said.reasoning_content is not None:
            message["reasoning_content"] = said.reasoning_content
        if said.tool_calls:
            message["content"] = said.content or None
            message["tool_calls"] = [
                {
                    "id": f"call_{self.number}_{index}_{number}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for number, call in enumerate(said.tool_calls)
            ]
        return message

    def _chunk(self, index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{self.number}", "object": kind, "created": int(time.time()), "model": self.model}

    def _usage(self) -> dict[str, int]:
        sampled = sum(choice.num_tokens for choice in self.choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": self.prompt_tokens + sampled,
        }


def _pieces(text: str) -> Iterator[str]:
    return (text[start : start + _CHUNK] for start in range(0, len(text), _CHUNK))
