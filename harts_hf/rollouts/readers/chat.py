"""Messages of several interfaces as OpenAI's chat interface has them: the one that chat templates know.

Taken are chat messages (tool calls as objects, flat objects, or JSON strings of either), Anthropic's content blocks
(``anthropic.py``) and items of OpenAI's Responses interface (``responses.py``). What is none of these stays as it is:
whoever renders it sees that it leaves no token. Nulls are as absent but in arguments of tool calls, where the policy
may have meant them. A message's ``weight``, 0 or 1, says whether it is trained, as in OpenAI's fine-tuning files.
"""

import json
from collections.abc import Iterable
from typing import Any

from harts_hf.rollouts.fields import shortened
from harts_hf.rollouts.readers import anthropic, responses
from harts_hf.rollouts.readers.conversation import Message


def chat_messages(items: Any, what: str = "messages") -> list[Message]:
    """A list of messages, items and responses in the form of OpenAI's chat interface.

    Args:
        items: what a file has, or a JSON string of it; it is not changed.
        what: its name in an error.

    Raises:
        ValueError: no list of objects, or an empty one; tool calls that are no objects; a weight between 0 and 1.
    """
    if isinstance(items, str) and items.lstrip().startswith("["):  # some write them as JSON into a column of texts
        items = _parsed(items) or items
    if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
        raise ValueError(f"expected {what} to be a non-empty list of objects, got {shortened(items)}")
    found: list[Message] = []
    for item in _unfolded(items):
        weight = item.get("weight")
        if weight not in (None, 0, 1):
            raise ValueError(f"message {len(found) + 1}: expected a weight of 0 or 1, got {shortened(weight)}")
        if responses.is_item(item):
            responses.append_item(found, item)
            if weight == 0 and found and found[-1].get("role") == "assistant":
                found[-1]["weight"] = 0  # of the whole turn, which may be of several items
        else:
            found.extend(anthropic.without_blocks(_message(item, len(found) + 1)))
    if not found:
        raise ValueError(f"expected {what} that say something, got {len(items)} empty items")
    return found


def tool_descriptions(tools: Any) -> list[dict[str, Any]] | None:
    """Descriptions of tools in OpenAI's form, from that form, Anthropic's, the Responses interface's or a JSON string.

    Raises:
        ValueError: something else than a list of objects, or of JSON strings of objects.
    """
    if tools is None or tools == "" or tools == []:
        return None
    if isinstance(tools, str):
        tools = _parsed(tools)
    if not isinstance(tools, list):
        raise ValueError(f"expected tools to be a list of objects, got {shortened(tools)}")
    found = [_parsed(tool) if isinstance(tool, str) else tool for tool in tools]
    if not all(isinstance(tool, dict) for tool in found):
        raise ValueError("expected tools to be a list of objects")
    return [_description(tool) for tool in found]


def _description(tool: dict[str, Any]) -> dict[str, Any]:
    schema = tool.get("input_schema", tool.get("parameters"))
    if "function" in tool or not isinstance(tool.get("name"), str) or schema is None:
        return tool
    function = {"name": tool["name"], "description": tool.get("description"), "parameters": schema}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _unfolded(items: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """The items; of a whole response of the Responses interface, those of its output."""
    for item in items:
        output = item.get("output") if item.get("object") == "response" else None
        if isinstance(output, list) and all(isinstance(entry, dict) for entry in output):
            yield from output
        else:
            yield item


def _message(item: dict[str, Any], number: int) -> Message:
    message = {key: value for key, value in item.items() if value is not None or key == "content"}
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        message["tool_calls"] = [_call(call, number, index) for index, call in enumerate(calls, 1)]
        if not calls:
            del message["tool_calls"]
    if isinstance(message.get("content"), list):
        message["content"] = [_block(block) for block in message["content"]]
    return message


def _block(block: Any) -> Any:
    if not isinstance(block, dict):
        return block
    block = {key: value for key, value in block.items() if value is not None}
    return {**block, "type": "text"} if block.get("type") in ("input_text", "output_text") else block


def _call(call: Any, number: int, index: int) -> Any:
    if isinstance(call, str):
        parsed = _parsed(call)
        if not isinstance(parsed, dict):
            raise ValueError(f"message {number}: expected tool call {index} to be an object, got {shortened(call)}")
        call = parsed
    if not isinstance(call, dict):
        return call
    call = {key: value for key, value in call.items() if value is not None}
    if "function" not in call and isinstance(call.get("name"), str):
        function = {key: call.pop(key) for key in ("name", "arguments") if key in call}
        call = {"type": "function", **call, "function": function}
    elif isinstance(call.get("function"), dict):
        call["function"] = {key: value for key, value in call["function"].items() if value is not None}
    return call


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
