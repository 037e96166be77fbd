"""A prompt and its completion: TRL's data sets and the results of verifiers, as messages or as plain texts.

https://huggingface.co/docs/trl/dataset_formats, https://github.com/PrimeIntellect-ai/verifiers. The completion of an
agent holds results of tools and answers of users, too; what the prompt's assistant says is an example, not sampled.
Rows of verifiers may have a ``trajectory`` of steps, each with a prompt and completion: a request each.
"""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from harts_hf.rollouts.fields import shortened
from harts_hf.rollouts.readers.chat import chat_messages, tool_descriptions
from harts_hf.rollouts.readers.conversation import Conversation, PlainText, Thread, keys_of, objects, reward_of

KEYS = ("prompt", "completion", "trajectory", "reward", "group", "episode", "example_id", "tools")
IGNORED = ("answer", "task", "info", "metrics", "timing", "is_completed", "is_truncated", "stop_condition", "error")


def is_row(row: Any) -> bool:
    """Whether a row has a prompt and a completion."""
    return isinstance(row, dict) and "prompt" in row and "completion" in row


def read(row: dict[str, Any]) -> Iterator[Conversation]:
    """The conversation of a row."""
    tools = tool_descriptions(row.get("tools"))
    steps = row.get("trajectory")
    if isinstance(steps, list) and steps:
        threads = [_thread(step, tools, f"step {i}: ") for i, step in enumerate(objects(steps, "trajectory"), 1)]
    else:
        threads = [_thread(row, tools, "")]
    group = row.get("group")
    yield Conversation(
        threads=threads,
        reward=reward_of(row),
        group=row.get("example_id") if group is None else group,
        source=row,
    )


def _thread(row: dict[str, Any], tools: list[dict[str, Any]] | None, where: str) -> Thread | PlainText:
    if "prompt" not in row or "completion" not in row:
        raise ValueError(f"expected {where}prompt and completion, got {keys_of(row)}")
    prompt, completion = (_messages_of_text(row[key]) for key in ("prompt", "completion"))
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise ValueError(f"expected {where}a completion of at least one character, got ''")
        return PlainText(prompt=prompt, completion=completion)
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    if isinstance(prompt, str):
        raise ValueError(f"expected {where}prompt to be messages as its completion is, got {shortened(prompt)}")
    before = chat_messages(prompt, f"{where}prompt")
    after = chat_messages(completion, f"{where}completion")
    sampled = frozenset(range(len(before), len(before) + len(after)))
    return Thread(messages=[*before, *after], sampled=sampled, tools=tools)


def _messages_of_text(value: Any) -> Any:
    """Messages that were written as a JSON string; other values as they are."""
    if isinstance(value, str) and value.lstrip().startswith("[{"):
        with contextlib.suppress(ValueError, RecursionError):
            parsed = json.loads(value)
            if all(isinstance(entry, dict) and "role" in entry for entry in parsed):
                return parsed
    return value
