"""SWE-agent's ``.traj``: the agent's history, and where the file has them the messages of each query.

The history holds every message; a history processor of the agent may have left some of them out of a query, so the
queries are the better record. https://swe-agent.com/latest/usage/trajectories/
"""

from collections.abc import Iterator
from typing import Any

from harts_hf.rollouts.readers.chat import chat_messages, tool_descriptions
from harts_hf.rollouts.readers.conversation import Conversation, Message, Thread, joined, need, objects, strings_of

KEYS = ("trajectory", "history", "tools")
IGNORED = ("info", "environment", "replay_config", "instance_id")
# What SWE-agent notes down beside a message.
_NOTES = ("agent", "message_type", "thought", "action", "is_demo", "cache_control", "tags", "thinking_blocks")


def is_row(row: Any) -> bool:
    """Whether an object has a history of messages, beside a trajectory or alone."""
    if not isinstance(row, dict) or not isinstance(row.get("history"), list) or not row["history"]:
        return False
    return all(isinstance(entry, dict) and "role" in entry for entry in row["history"])


def read(row: dict[str, Any]) -> Iterator[Conversation]:
    """A conversation; a thread per query if each step has its own, else one of the history."""
    history = objects(need(row, "history", list), "history")
    tools = tool_descriptions(row.get("tools"))
    messages: list[Message] = []
    sampled = []
    for entry in history:
        said = _messages([entry])
        if entry.get("role") == "assistant" and not entry.get("is_demo"):
            sampled.append(len(messages))
        messages += said
    answers = [messages[index] for index in sampled]
    queries = _queries(row, answers)
    if queries is None:
        threads = [Thread(messages=messages, sampled=frozenset(sampled), tools=tools)]
    else:
        threads = [
            Thread(messages=[*query, answer], sampled=frozenset([len(query)]), tools=tools)
            for query, answer in zip(queries, answers, strict=True)
        ]
    yield Conversation(threads=threads, group=row.get("instance_id"), source=row)


def _messages(history: list[dict[str, Any]]) -> list[Message]:
    found = []
    for entry in history:
        message = {key: value for key, value in entry.items() if key not in _NOTES}
        ids = message.pop("tool_call_ids", None)
        if ids and entry.get("role") == "tool":
            message["tool_call_id"] = ids[0] if isinstance(ids, list) else ids
        if thought := joined(strings_of(entry.get("thinking_blocks"), "thinking")):
            message["reasoning_content"] = thought
        found.append(message)
    return chat_messages(found, "history")


def _queries(row: dict[str, Any], answers: list[Message]) -> list[list[Message]] | None:
    steps = row.get("trajectory")
    if not isinstance(steps, list) or len(steps) != len(answers):
        return None
    found = []
    for step, answer in zip(steps, answers, strict=True):
        query = step.get("query") if isinstance(step, dict) else None
        if not isinstance(query, list) or not query or not all(isinstance(entry, dict) for entry in query):
            return None
        said, response = answer.get("content"), step.get("response")
        if isinstance(said, str) and isinstance(response, str) and said != response:
            return None
        found.append(_messages(query))
    return found
