"""mini-swe-agent's ``.traj.json``: messages, and ``info`` about the run. https://mini-swe-agent.com

Its last message may have the role ``exit``, which no model sees. Its reward is not in the file.
"""

from collections.abc import Iterator
from typing import Any

from harts_hf.rollouts.readers.chat import chat_messages, tool_descriptions
from harts_hf.rollouts.readers.conversation import Conversation, Thread, get, need, objects, reward_of

KEYS = ("messages", "info", "trajectory_format", "instance_id", "tools", "reward")
IGNORED = ("agent", "environment", "segments")


def is_row(row: Any) -> bool:
    """Whether an object says so, or has messages beside the outcome of a run."""
    if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
        return False
    if str(row.get("trajectory_format", "")).startswith("mini-swe-agent"):
        return True
    info = row.get("info")
    return isinstance(info, dict) and bool({"mini_version", "exit_status"} & info.keys())


def read(row: dict[str, Any]) -> Iterator[Conversation]:
    """The conversation of a file, or of a row of several."""
    messages = objects(need(row, "messages", list), "messages")
    skipped = sum(message.get("role") == "exit" for message in messages)
    messages = [
        {key: value for key, value in message.items() if key != "extra"}
        for message in messages
        if message.get("role") != "exit"
    ]
    info = get(row, "info", dict) or {}
    group = row.get("instance_id")
    yield Conversation(
        threads=[Thread(messages=chat_messages(messages), tools=tool_descriptions(row.get("tools")))],
        reward=reward_of(row),
        group=info.get("instance_id") if group is None else group,
        source=row,
        skipped={"exit": skipped} if skipped else {},
    )
