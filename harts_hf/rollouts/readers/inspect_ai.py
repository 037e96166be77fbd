"""Logs of Inspect (``inspect_ai``) in JSON: ``samples`` with ``messages`` and ``scores``.

https://inspect.aisi.org.uk/eval-logs.html. The binary ``.eval`` files become such by `inspect log convert --to json`.
A reward is taken where a sample has exactly one score: a number, or one of Inspect's letters.
"""

from collections.abc import Iterator
from typing import Any

from harts_hf.rollouts.readers.chat import chat_messages
from harts_hf.rollouts.readers.conversation import Conversation, Message, Thread, get, joined, need, objects

KEYS = ("samples",)
IGNORED = (
    *("version", "status", "eval", "plan", "results", "stats", "reductions", "error", "location", "invalidated"),
    *("tags", "metadata", "log_updates", "etag"),
    *("id", "epoch", "input", "target", "messages", "output", "scores", "model_usage", "store", "events", "choices"),
)
LETTERS = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}


def is_row(row: Any) -> bool:
    """Whether a document has ``samples``, or is one."""
    return isinstance(row, dict) and (
        (isinstance(row.get("samples"), list) and "eval" in row)
        or (isinstance(row.get("messages"), list) and "scores" in row and "epoch" in row)
    )


def read(row: dict[str, Any]) -> Iterator[Conversation]:
    """The conversations of a log, one per sample and epoch."""
    samples = objects(need(row, "samples", list), "samples") if "samples" in row else [row]
    for number, sample in enumerate(samples, 1):
        try:
            messages = [_message(message) for message in objects(need(sample, "messages", list), "messages")]
            yield Conversation(
                threads=[Thread(messages=chat_messages(messages), sampled=_sampled(sample["messages"]))],
                reward=_reward(sample),
                group=sample.get("id"),
                source=sample,
            )
        except ValueError as error:
            raise ValueError(f"sample {number}: {error}") from error


def _sampled(messages: list[dict[str, Any]]) -> frozenset[int]:
    """The assistant's messages but those that the task gave as input."""
    return frozenset(index for index, message in enumerate(messages) if message.get("source") != "input")


def _message(message: dict[str, Any]) -> Message:
    found = {key: message[key] for key in ("role", "content", "tool_call_id") if message.get(key) is not None}
    if isinstance(content := found.get("content"), list):
        kinds = [block.get("type") if isinstance(block, dict) else None for block in content]
        thoughts = [block.get("reasoning") for block, kind in zip(content, kinds, strict=True) if kind == "reasoning"]
        if joined(thoughts):
            found["reasoning_content"] = joined(thoughts)
        found["content"] = [block for block, kind in zip(content, kinds, strict=True) if kind != "reasoning"] or ""
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        found["tool_calls"] = [_call(call) for call in calls]
    return found


def _call(call: Any) -> Any:
    if isinstance(call, dict) and isinstance(call.get("function"), str):
        function = {"name": call["function"], "arguments": call.get("arguments") or {}}
        return {"id": call.get("id"), "type": "function", "function": function}
    return call


def _reward(sample: dict[str, Any]) -> float | None:
    scores = get(sample, "scores", dict) or {}
    if len(scores) != 1:
        return None
    (score,) = scores.values()
    value = score.get("value") if isinstance(score, dict) else score
    if isinstance(value, str):
        return LETTERS.get(value)
    return float(value) if isinstance(value, int | float) and abs(value) < float("inf") else None
