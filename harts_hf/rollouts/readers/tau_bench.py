"""Results of tau-bench: a list of runs with ``traj``, ``task_id``, ``trial`` and ``reward``.

https://github.com/sierra-research/tau-bench: messages in OpenAI's form, the system prompt among them.
"""

from collections.abc import Iterator
from typing import Any

from harts_hf.rollouts.readers.chat import chat_messages, tool_descriptions
from harts_hf.rollouts.readers.conversation import Conversation, Thread, need, reward_of

KEYS = ("traj", "task_id", "reward", "tools")
IGNORED = ("trial", "info")


def is_row(row: Any) -> bool:
    """Whether an object has a ``traj``."""
    return isinstance(row, dict) and isinstance(row.get("traj"), list)


def read(row: dict[str, Any]) -> Iterator[Conversation]:
    """The conversation of a run."""
    messages = chat_messages(need(row, "traj", list), "traj")
    yield Conversation(
        threads=[Thread(messages=messages, tools=tool_descriptions(row.get("tools")))],
        reward=reward_of(row),
        group=row.get("task_id"),
        source=row,
    )
