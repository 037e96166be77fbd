"""ShareGPT's form: ``conversations`` of ``from`` and ``value``, with the system prompt and tools beside them."""

import json
from collections.abc import Iterator
from typing import Any

from harts_hf.rollouts.fields import shortened
from harts_hf.rollouts.readers import anthropic
from harts_hf.rollouts.readers.chat import chat_messages, tool_descriptions
from harts_hf.rollouts.readers.conversation import Conversation, Message, Thread, need, objects, reward_of

KEYS = ("conversations", "system", "tools", "reward", "group", "episode")
IGNORED = ("id", "source")
ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool": "tool",
}


def is_row(row: Any) -> bool:
    """Whether a row has ``conversations``."""
    return isinstance(row, dict) and isinstance(row.get("conversations"), list)


def read(row: dict[str, Any]) -> Iterator[Conversation]:
    """The conversation of a row."""
    entries = objects(need(row, "conversations", list), "conversations")
    messages = chat_messages([_message(entry, number) for number, entry in enumerate(entries, 1)], "conversations")
    yield Conversation(
        threads=[
            Thread(
                messages=[*anthropic.system_message(row.get("system")), *messages],
                tools=tool_descriptions(row.get("tools")),
            )
        ],
        reward=reward_of(row),
        group=row.get("group"),
        source=row,
    )


def _message(entry: dict[str, Any], number: int) -> Message:
    if "role" in entry and "from" not in entry:
        return entry
    role = ROLES.get(str(entry.get("from")).lower())
    if role is None:
        raise ValueError(
            f"message {number}: expected from to be one of {', '.join(ROLES)}, got {shortened(entry.get('from'))}"
        )
    value = entry.get("value")
    if not isinstance(value, str):
        raise ValueError(f"message {number}: expected value to be a text, got {shortened(value)}")
    said = {"role": role, "weight": entry.get("weight")}
    if entry["from"].lower() == "function_call":
        return {**said, "content": "", "tool_calls": _calls(value, number)}
    return {**said, "content": value}


def _calls(value: str, number: int) -> list[dict[str, Any]]:
    try:
        calls = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"message {number}: expected a call as JSON, got {shortened(value)} ({error})") from error
    calls = objects(calls if isinstance(calls, list) else [calls], f"message {number}: the calls")
    if not all(isinstance(call.get("name"), str) for call in calls):
        raise ValueError(f"message {number}: expected calls with a name, got {shortened(value)}")
    return calls
