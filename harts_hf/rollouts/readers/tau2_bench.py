"""Results of tau2-bench: ``simulations`` of ``tasks``, with the policy that the agent was given in ``info``.

https://github.com/sierra-research/tau2-bench. The agent does not see what the simulated user does with its own tools,
and the greeting at the start is the benchmark's, not sampled. The system prompt is not in the file: the policy, which
it is made of, takes its place.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from harts_hf.rollouts.readers.chat import chat_messages, tool_descriptions
from harts_hf.rollouts.readers.conversation import (
    Conversation,
    Message,
    Thread,
    get,
    joined,
    need,
    objects,
    reward_of,
    strings_of,
)

KEYS = ("simulations", "info")
IGNORED = ("tasks", "timestamp")


def is_row(row: Any) -> bool:
    """Whether a document has ``simulations``."""
    return isinstance(row, dict) and isinstance(row.get("simulations"), list)


def read(row: dict[str, Any]) -> Iterator[Conversation]:
    """The conversations of a document, one per simulation."""
    environment = get(get(row, "info", dict) or {}, "environment_info", dict, "info.") or {}
    policy = get(environment, "policy", str, "info.environment_info.")
    tools = environment.get("tool_defs")
    described = tool_descriptions(tools) if isinstance(tools, list) else None
    for number, simulation in enumerate(objects(need(row, "simulations", list), "simulations"), 1):
        try:
            yield _conversation(simulation, policy, described)
        except ValueError as error:
            raise ValueError(f"simulation {number}: {error}") from error


def _conversation(simulation: dict[str, Any], policy: str | None, tools: list[dict[str, Any]] | None) -> Conversation:
    skipped: Counter[str] = Counter()
    seen: list[Message] = []
    for message in _flat(objects(need(simulation, "messages", list), "messages")):
        if message.get("role") == "tool" and message.get("requestor") == "user":
            skipped["results of the user's tools"] += 1
        elif message.get("role") == "user" and message.get("tool_calls"):
            skipped["tool calls of the user"] += 1
        else:
            seen.append(_message(message))
    messages = chat_messages(seen)
    first_user = next((i for i, message in enumerate(messages) if message.get("role") != "assistant"), len(messages))
    system: list[Message] = [] if policy is None else [{"role": "system", "content": policy}]
    info = get(simulation, "reward_info", dict) or {}
    return Conversation(
        threads=[
            Thread(
                messages=[*system, *messages],
                sampled=frozenset(range(len(system) + first_user, len(system) + len(messages))),
                tools=tools,
            )
        ],
        reward=reward_of(info, "reward", "reward_info."),
        group=simulation.get("task_id"),
        source=simulation,
        skipped=skipped,
    )


def _flat(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for message in messages:
        if isinstance(message.get("tool_messages"), list):
            yield from objects(message["tool_messages"], "tool_messages")
        else:
            yield message


def _message(message: dict[str, Any]) -> Message:
    found = {key: message.get(key) for key in ("role", "content")}
    if message.get("role") == "tool":
        found["tool_call_id"] = message.get("id")
    if message.get("tool_calls"):
        found["tool_calls"] = message["tool_calls"]
    raw = message.get("raw_data")
    if message.get("role") == "assistant" and isinstance(raw, dict):
        said = raw.get("message")
        thought = said.get("reasoning_content") if isinstance(said, dict) else None
        thought = joined([thought]) or joined(strings_of(raw.get("thinking_blocks"), "thinking"))
        if thought:
            found["reasoning_content"] = thought
    return found
