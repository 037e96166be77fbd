"""Items of OpenAI's Responses interface as chat messages.

A conversation is a list of *items*: messages, thoughts (``reasoning``), calls (``function_call``) and their results
(``function_call_output``). What the model wrote between two inputs is one turn; a text after a text, or after a call,
begins another.
"""

from typing import Any

from harts_hf.rollouts.readers.conversation import Message, joined

_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def is_item(item: dict[str, Any]) -> bool:
    """Whether an object is a whole item; a message is one only if its blocks are named as items name them."""
    kind = item.get("type")
    if kind == "function_call":
        return isinstance(item.get("name"), str) and "arguments" in item
    if kind == "function_call_output":
        return "output" in item
    if kind == "reasoning":
        return "role" not in item and ("summary" in item or "content" in item or "encrypted_content" in item)
    content = item.get("content")
    return kind == "message" and "role" in item and isinstance(content, str | list)


def append_item(messages: list[Message], item: dict[str, Any]) -> None:
    """Adds an item to the messages: to the last one where both are parts of the same turn."""
    kind = item["type"]
    if kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": _said(item["output"])})
    elif kind == "function_call":
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item.get("call_id") or item.get("id"), "type": "function", "function": function}
        _open_turn(messages).setdefault("tool_calls", []).append(call)
    elif kind == "reasoning":
        thought = joined(_texts(item.get("content")) or _texts(item.get("summary")) or ())
        if thought:
            last = messages[-1] if messages else {}
            # Thoughts after a text begin another turn; between two calls of one turn they belong to it.
            turn = last if last.get("role") == "assistant" and not last.get("content") else _new_turn(messages)
            turn["reasoning_content"] = joined([turn.get("reasoning_content"), thought])
    elif item["role"] != "assistant":
        messages.append({"role": item["role"], "content": _said(item["content"])})
    elif said := _said(item["content"]):
        last = messages[-1] if messages else {}
        is_open = last.get("role") == "assistant" and not last.get("content") and not last.get("tool_calls")
        (last if is_open else _new_turn(messages))["content"] = said


def _open_turn(messages: list[Message]) -> Message:
    return messages[-1] if messages and messages[-1].get("role") == "assistant" else _new_turn(messages)


def _new_turn(messages: list[Message]) -> Message:
    messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _said(content: Any) -> Any:
    """One text where the content is made of texts only, else the blocks as they are."""
    texts = _texts(content)
    if isinstance(content, str) or texts is None:
        return content
    return "".join(texts)


def _texts(content: Any) -> list[str] | None:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        return None
    blocks = [block for block in content if isinstance(block, dict) and block.get("type") in _TEXTS]
    texts = [block["text"] for block in blocks if isinstance(block.get("text"), str)]
    return texts if len(texts) == len(content) else None
