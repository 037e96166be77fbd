"""NeMo Gym's rollouts, and other rows of the Responses interface: an ``input`` and the ``output`` that answers it.

NeMo Gym's have ``responses_create_params`` (with ``input`` and ``tools``), ``response`` (with ``output``), ``reward``
and ``_ng_task_index``. The output holds the results of tools, too.
"""

from collections.abc import Iterator
from typing import Any

from harts_hf.rollouts.readers.chat import chat_messages, tool_descriptions
from harts_hf.rollouts.readers.conversation import Conversation, Thread, get, need, reward_of

KEYS = ("responses_create_params", "response", "input", "output", "instructions", "tools", "reward", "_ng_task_index")
IGNORED = ("_ng_rollout_index", "agent_ref", "id", "object", "model", "created_at", "status", "usage")


def is_row(row: Any) -> bool:
    """Whether a row is such a rollout."""
    if not isinstance(row, dict):
        return False
    if isinstance(row.get("responses_create_params"), dict):
        return True
    output = row.get("output")
    return "input" in row and isinstance(output, list) and any(isinstance(x, dict) and "type" in x for x in output)


def read(row: dict[str, Any]) -> Iterator[Conversation]:
    """What the input says is context, what the output's model wrote is sampled."""
    if "responses_create_params" in row:
        request = need(row, "responses_create_params", dict)
        output = need(need(row, "response", dict), "output", list, "response.")
    else:
        request, output = row, need(row, "output", list)
    given = request.get("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    before = chat_messages(given, "input") if given else []
    if instructions := get(request, "instructions", str):
        before.insert(0, {"role": "system", "content": instructions})
    after = chat_messages(output, "output")
    # Some agents put their whole history into the output.
    if before and (after[: len(before)] == before or after[0].get("role") == "system"):
        before = []
    yield Conversation(
        threads=[
            Thread(
                messages=[*before, *after],
                sampled=frozenset(range(len(before), len(before) + len(after))),
                tools=tool_descriptions(request.get("tools")),
            )
        ],
        reward=reward_of(row),
        group=row.get("_ng_task_index"),
        source=row,
    )
