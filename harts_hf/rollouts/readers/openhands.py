"""OpenHands' ``output.jsonl``: a row per instance, with the ``history`` of events.

https://github.com/All-Hands-AI/OpenHands and its SDK. Answers are taken from the model's own responses, which actions
carry (``tool_call_metadata.model_response``; in the SDK's events ``tool_call``): several actions of one response are
one turn. An action without one is written as a call of its name. Events that say nothing to the model are counted.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from harts_hf.rollouts.readers.chat import chat_messages, tool_descriptions
from harts_hf.rollouts.readers.conversation import Conversation, Message, Thread, get, need, objects, reward_of
from harts_hf.rollouts.readers.openhands_sdk import is_sdk_event, read_sdk_events

KEYS = ("history", "instance_id", "reward", "report", "test_result")
IGNORED = ("instruction", "metadata", "metrics", "error", "git_patch", "instance", "attempt", "fine_grained_report")
# What the model is not told of.
SILENT_ACTIONS = ("change_agent_state", "recall", "condensation", "condensation_request", "null", "loading", "pause")
SILENT_OBSERVATIONS = ("agent_state_changed", "recall", "null", "agent_condensed")


def is_row(row: Any) -> bool:
    """Whether an object has a history of events."""
    if not isinstance(row, dict) or not isinstance(row.get("history"), list) or not row["history"]:
        return False
    events = list(_flat(row["history"]))
    return all(isinstance(event, dict) and "role" not in event for event in events) and any(
        {"action", "observation", "kind"} & event.keys() for event in events
    )


def read(row: dict[str, Any]) -> Iterator[Conversation]:
    """The conversation of a row."""
    events = objects(list(_flat(need(row, "history", list))), "history")
    skipped: Counter[str] = Counter()
    messages: list[Message] = []
    if any(map(is_sdk_event, events)):
        tools = read_sdk_events(events, messages, skipped)
    else:
        tools = _read_events(events, messages, skipped)
    yield Conversation(
        threads=[Thread(messages=chat_messages(messages, "history"), tools=tool_descriptions(tools))],
        reward=_reward(row),
        group=row.get("instance_id"),
        source=row,
        skipped=skipped,
    )


def _flat(history: list[Any]) -> Iterator[Any]:
    """Events; older files have pairs of an action and its observation."""
    for entry in history:
        if isinstance(entry, list):
            yield from entry
        else:
            yield entry


def _read_events(events: list[dict[str, Any]], messages: list[Message], skipped: Counter[str]) -> Any:
    """Appends what the events say; returns the descriptions of tools, or None."""
    tools, last = None, None
    for number, event in enumerate(events, 1):
        what = f"event {number}: "
        call = get(event, "tool_call_metadata", dict, what) or {}
        if "observation" in event:
            kind = event["observation"]
            if kind in SILENT_OBSERVATIONS:
                skipped[f"{kind}"] += 1
            elif call:
                messages.append(
                    {"role": "tool", "tool_call_id": call.get("tool_call_id"), "content": event.get("content") or ""}
                )
            else:
                messages.append({"role": "user", "content": event.get("content") or ""})
            continue
        action, arguments = event.get("action"), get(event, "args", dict, what) or {}
        response = get(call, "model_response", dict, f"{what}tool_call_metadata.") or {}
        answer = _answer(response, what) if response else None
        if action == "system":
            tools = arguments.get("tools") or tools
            messages.append({"role": "system", "content": arguments.get("content")})
        elif answer is not None:
            if last is None or last != response.get("id"):
                messages.append(answer)
            last = response.get("id")
        elif action in SILENT_ACTIONS:
            skipped[f"{action}"] += 1
        elif action == "message":
            role = "assistant" if event.get("source") == "agent" else "user"
            messages.append({"role": role, "content": arguments.get("content")})
        elif event.get("source") == "agent":
            skipped["actions without the model's response, written as calls of their name"] += 1
            said = {key: value for key, value in arguments.items() if key != "thought" and value is not None}
            function = {"name": str(action), "arguments": said}
            thought = arguments.get("thought")
            messages.append(
                {
                    "role": "assistant",
                    "content": thought if isinstance(thought, str) else "",
                    "tool_calls": [{"type": "function", "function": function}],
                }
            )
        else:
            skipped[f"{action} of the {event.get('source')}"] += 1
    return tools


def _answer(response: dict[str, Any], what: str) -> Message:
    choices = objects(need(response, "choices", list, f"{what}model_response."), f"{what}model_response.choices")
    if not choices:
        raise ValueError(f"expected {what}model_response.choices of at least one, got none")
    return {**need(choices[0], "message", dict, f"{what}model_response.choices[0]."), "role": "assistant"}


def _reward(row: dict[str, Any]) -> float | None:
    """The row's reward, or whether its instance was resolved."""
    reports = [row.get("report"), row.get("test_result")]
    reports += [report.get("report") for report in reports if isinstance(report, dict)]
    for report in reports:
        if isinstance(report, dict) and isinstance(report.get("resolved"), bool):
            return float(report["resolved"])
    return reward_of(row)
