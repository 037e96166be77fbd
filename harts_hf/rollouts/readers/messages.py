"""Rows of chat messages: OpenAI's or Anthropic's form, one list for a conversation, or a list of lists for requests.

Where a file has a list of messages per request, the last answer of each is what was sampled for it; the answers
before are its history.
"""

from collections.abc import Iterator
from typing import Any

from harts_hf.rollouts.readers import anthropic
from harts_hf.rollouts.readers.chat import chat_messages, tool_descriptions
from harts_hf.rollouts.readers.conversation import Conversation, Thread, last_answer, reward_of

KEYS = ("group", "messages", "tools", "reward", "episode", "loss_mask", "advantage", "old_logprobs")
ANTHROPIC_KEYS = (*KEYS, "system")


def is_row(row: Any) -> bool:
    """Whether a row has ``messages``, or is a list of messages."""
    if isinstance(row, dict):
        return "messages" in row
    return isinstance(row, list) and all(isinstance(entry, dict) and "role" in entry for entry in row)


def is_requests(row: Any) -> bool:
    """Whether a row, or its ``messages``, is a list of lists of messages."""
    lists = row.get("messages") if isinstance(row, dict) else row
    return isinstance(lists, list) and bool(lists) and all(isinstance(entry, list) and entry for entry in lists)


def read(row: Any) -> Iterator[Conversation]:
    """The conversation of a row."""
    if isinstance(row, list):
        row = {"messages": row}
    given = row.get("messages")
    tools = tool_descriptions(row.get("tools"))
    system = anthropic.system_message(row.get("system"))
    if is_requests(row):
        histories = [chat_messages(request, f"request {number}") for number, request in enumerate(given, 1)]
        threads = [
            Thread(messages=[*system, *history], sampled=last_answer([*system, *history]), tools=tools)
            for history in histories
        ]
    else:
        threads = [Thread(messages=[*system, *chat_messages(given)], tools=tools)]
    yield Conversation(threads=threads, reward=reward_of(row), group=row.get("group"), source=row)
