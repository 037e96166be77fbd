"""Events of OpenHands' SDK (those with a ``kind``) as chat messages."""

from collections import Counter
from typing import Any

from harts_hf.rollouts.readers.conversation import Message, get, joined, need, strings_of


def is_sdk_event(event: dict[str, Any]) -> bool:
    """Whether an event is of the SDK's kinds."""
    return isinstance(event.get("kind"), str) and not isinstance(event.get("action"), str)


def read_sdk_events(events: list[dict[str, Any]], messages: list[Message], skipped: Counter[str]) -> Any:
    """Appends what the events say to the messages; returns the descriptions of tools, or None."""
    tools: Any = None
    turns: dict[str, Message] = {}
    for number, event in enumerate(events, 1):
        what, kind = f"event {number}: ", event.get("kind")
        if kind == "SystemPromptEvent":
            messages.append({"role": "system", "content": _text(need(event, "system_prompt", dict, what))})
            tools = [
                tool for tool in event.get("tools") or () if isinstance(tool, dict) and "function" in tool
            ] or tools
        elif kind == "MessageEvent":
            said = need(event, "llm_message", dict, what)
            role = "assistant" if event.get("source") == "agent" else said.get("role", "user")
            messages.append({"role": role, "content": _text(said.get("content")), **_thought(said)})
        elif kind == "ActionEvent":
            call = need(event, "tool_call", dict, what)
            call = call if "function" in call else {"id": call.get("id"), **_function(call, what)}
            response = event.get("llm_response_id")
            turn = turns.get(response) if isinstance(response, str) else None
            if turn is None:
                turn = {
                    "role": "assistant",
                    "content": _text(event.get("thought")),
                    "tool_calls": [],
                    **_thought(event),
                }
                messages.append(turn)
                if isinstance(response, str):
                    turns[response] = turn
            turn["tool_calls"].append(call)
        elif kind in ("ObservationEvent", "UserRejectObservation", "AgentErrorEvent"):
            observation = get(event, "observation", dict, what) or {}
            texts = [_text(observation.get("content")), event.get("error"), event.get("rejection_reason")]
            content = joined(text for text in texts if isinstance(text, str)) or ""
            messages.append({"role": "tool", "tool_call_id": event.get("tool_call_id"), "content": content})
        else:
            skipped[str(kind)] += 1
    return tools


def _function(call: dict[str, Any], what: str) -> dict[str, Any]:
    name = need(call, "name", str, f"{what}tool_call.")
    return {"type": "function", "function": {"name": name, "arguments": call.get("arguments", "{}")}}


def _thought(event: dict[str, Any]) -> dict[str, str]:
    thought = event.get("reasoning_content")
    if not isinstance(thought, str):
        blocks = event.get("thinking_blocks")
        thought = joined(strings_of(blocks, "thinking"))
    return {"reasoning_content": thought} if thought else {}


def _text(content: Any) -> str:
    """The text of a text, a block, or a list of blocks."""
    if isinstance(content, str):
        return content
    return "".join(strings_of(content if isinstance(content, list) else [content], "text"))
