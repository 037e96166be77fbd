"""Anthropic's messages: content blocks ``text``, ``thinking``, ``tool_use`` and ``tool_result``.

https://docs.anthropic.com/en/api/messages: the system prompt is a field of its own, tools have an ``input_schema``,
results of tools are blocks of the user's message.
"""

from typing import Any

from harts_hf.rollouts.readers.conversation import Message, joined

_BLOCKS = ("tool_use", "tool_result", "thinking", "redacted_thinking")


def is_row(row: Any) -> bool:
    """Whether a row has messages with such blocks, or beside a system prompt of its own."""
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return False
    return "system" in row or any(_has_blocks(message.get("content")) for message in messages)


def system_message(system: Any) -> list[Message]:
    """The system prompt, a text or blocks of it, as a message; none where there is none."""
    return [] if system is None or system in ("", []) else [{"role": "system", "content": system}]


def without_blocks(message: Message) -> list[Message]:
    """A message as chat templates know it: calls and thoughts as fields, results of tools as messages of their own.

    Blocks that are not whole (a call without a name, a result of no call) and those of other types stay.
    """
    content: Any = message.get("content")
    if not _has_blocks(content):
        return [message]
    rest, calls, thoughts, results = [], [], [], []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use" and isinstance(block.get("name"), str) and isinstance(block.get("input", {}), dict):
            function = {"name": block["name"], "arguments": block.get("input", {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and "tool_use_id" in block:
            said = block.get("content", "")
            results.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": said})
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind != "redacted_thinking":  # encrypted: nobody can say which tokens it was
            rest.append(block)
    if results and not (rest or calls or thoughts):
        return results
    said = {**message, "content": rest or ""}
    if thoughts:
        said["reasoning_content"] = joined(thoughts)
    if calls:
        said["tool_calls"] = [*message.get("tool_calls", ()), *calls]
    return [*results, said]


def _has_blocks(content: Any) -> bool:
    return isinstance(content, list) and any(
        isinstance(block, dict) and block.get("type") in _BLOCKS for block in content
    )
