"""One conversation, written as each program would: whatever the form, the same samples have to come of it."""

import json
from typing import Any, NamedTuple

CALL = {"name": "ls", "arguments": {"path": "src", "depth": 2}}
# Two answers to the first request (the second after a tool), one to the last, after which nothing is said.
MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "how many files?"},
    {
        "role": "assistant",
        "content": "Looking.",
        "reasoning_content": "I list them.",
        "tool_calls": [{"id": "c1", "type": "function", "function": CALL}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "a b"},
    {"role": "assistant", "content": "Two files.", "reasoning_content": "a and b"},
    {"role": "user", "content": "thanks"},
    {"role": "assistant", "content": "Bye."},
]
TURNS = (2, 4, 6)


class Written(NamedTuple):
    """A file of a form.

    Attributes:
        rows: its rows; a single one may be a document.
        group: the group that is expected; None for the file's.
        reward: expected.
        messages: what is expected of the conversation.
        turns: and which of the messages are.
        conversations: how many conversations there are, all the same.
    """

    rows: list[Any]
    group: str | None = None
    reward: float | None = None
    messages: list[dict[str, Any]] = MESSAGES
    turns: tuple[int, ...] = TURNS
    conversations: int = 1


def without_thoughts(messages=MESSAGES):
    """Messages of a form that has no thoughts."""
    return [{key: value for key, value in message.items() if key != "reasoning_content"} for message in messages]


def with_strings(messages=MESSAGES):
    """Arguments of calls as JSON strings, and all the nulls that OpenAI's client writes."""
    found = []
    for message in messages:
        message = {"refusal": None, "audio": None, "function_call": None, **message}
        if "tool_calls" in message:
            arguments = json.dumps(CALL["arguments"])
            message["tool_calls"] = [
                {"id": "c1", "type": "function", "index": None, "function": {**CALL, "arguments": arguments}}
            ]
        found.append({"tool_calls": None, **message} if message["role"] == "assistant" else message)
    return found


def flat(messages=MESSAGES):
    """Calls without the level of ``function``."""
    return [{**m, "tool_calls": [{"id": "c1", **CALL}]} if "tool_calls" in m else m for m in messages]


def blocks():
    """Anthropic's blocks; the system prompt stands beside them."""
    return [
        {"role": "user", "content": [{"type": "text", "text": "how many files?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I list them.", "signature": "s"},
                {"type": "text", "text": "Looking.", "citations": None},
                {"type": "tool_use", "id": "c1", "name": "ls", "input": CALL["arguments"]},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "a b"}]},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "a and b"}, {"type": "text", "text": "Two files."}],
        },
        {"role": "user", "content": "thanks"},
        {"role": "assistant", "content": [{"type": "text", "text": "Bye."}]},
    ]


def items():
    """Items of the Responses interface that follow the request."""
    return [
        {"type": "reasoning", "id": "r1", "summary": [{"type": "summary_text", "text": "I list them."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Looking."}]},
        {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": json.dumps(CALL["arguments"])},
        {"type": "function_call_output", "call_id": "c1", "output": "a b"},
        {"type": "reasoning", "id": "r2", "summary": [], "content": [{"type": "reasoning_text", "text": "a and b"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Two files."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "thanks"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Bye."}]},
    ]


def nemo_gym():
    """A rollout of NeMo Gym."""
    request = {"input": MESSAGES[:2], "tools": [], "temperature": None}
    row = {"responses_create_params": request, "response": {"object": "response", "output": items()}}
    return [{**row, "reward": 0.5, "_ng_task_index": 3, "_ng_rollout_index": 0}]


def swe_agent(*, queries):
    """SWE-agent's file, with a demonstration before the task, which nobody sampled."""
    demo = [
        {"role": "user", "content": "a demonstration", "agent": "main", "is_demo": True},
        {"role": "assistant", "content": "shown", "agent": "main", "is_demo": True},
    ]
    history = [MESSAGES[0], *demo, *MESSAGES[1:]]
    noted = [
        {**without_thoughts([m])[0], "agent": "main", "message_type": "x", "thought": "", "action": ""}
        for m in history
    ]
    for entry, message in zip(noted, history, strict=True):
        if "reasoning_content" in message:
            entry["thinking_blocks"] = [{"type": "thinking", "thinking": message["reasoning_content"]}]
        if "tool_call_id" in entry:
            entry["tool_call_ids"] = [entry.pop("tool_call_id")]
    turns = [turn + 2 for turn in TURNS]
    steps = [{"action": "ls", "observation": "", "response": history[turn]["content"]} for turn in turns]
    if queries:
        for step, turn in zip(steps, turns, strict=True):
            step["query"] = noted[:turn]
    messages = [{key: m[key] for key in m if key not in ("agent", "is_demo")} for m in history]
    document = {"trajectory": steps, "history": noted, "info": {"exit_status": "submitted"}}
    return Written([document], messages=messages, turns=tuple(turns))


def mini_swe_agent():
    """mini-swe-agent's file: no tools, but texts; it ends with a role that no model sees."""
    messages = [
        *without_thoughts(MESSAGES[:2]),
        {"role": "assistant", "content": "THOUGHT: look\n```bash\nls\n```"},
        {"role": "user", "content": "<returncode>0</returncode>"},
        {"role": "assistant", "content": "done"},
    ]
    rows = [{**message, "extra": {"timestamp": 1.5, "actions": []}} for message in messages]
    rows.append({"role": "exit", "content": "diff", "extra": {}})
    document = {
        "info": {"exit_status": "Submitted", "mini_version": "2"},
        "messages": rows,
        "trajectory_format": "mini-swe-agent-1.1",
        "instance_id": "task-1",
    }
    return Written([document], group="task-1", messages=messages, turns=(2, 4))


def openhands():
    """OpenHands' events: two actions of one response are one turn; a change of state says nothing."""
    called = {**with_strings()[2], "content": "Looking.", "reasoning_content": "I list them."}
    second = {"id": "c2", "type": "function", "function": {"name": "pwd", "arguments": "{}"}}
    called["tool_calls"] = [*called["tool_calls"], second]
    response = {"id": "r1", "object": "chat.completion", "choices": [{"index": 0, "message": called}]}
    meta = {"function_name": "ls", "tool_call_id": "c1", "model_response": response, "total_calls_in_response": 2}
    events = [
        {"id": 0, "source": "agent", "action": "system", "args": {"content": "be brief", "tools": None}},
        {"id": 1, "source": "user", "action": "message", "args": {"content": "how many files?", "image_urls": None}},
        {"id": 2, "source": "environment", "observation": "agent_state_changed", "content": "", "extras": {}},
        {"id": 3, "source": "agent", "action": "run", "args": {"command": "ls"}, "tool_call_metadata": meta},
        {"id": 4, "source": "agent", "observation": "run", "content": "a b", "tool_call_metadata": meta},
        {"id": 5, "source": "agent", "action": "run", "tool_call_metadata": {**meta, "tool_call_id": "c2"}},
        {"id": 6, "observation": "run", "content": "/home", "tool_call_metadata": {**meta, "tool_call_id": "c2"}},
        {"id": 7, "source": "agent", "action": "message", "args": {"content": "Two files."}},
    ]
    first = {**MESSAGES[2], "tool_calls": [*MESSAGES[2]["tool_calls"], {**second, "function": {"name": "pwd"}}]}
    first["tool_calls"][1] = {**second, "function": {"name": "pwd", "arguments": {}}}
    messages = [*MESSAGES[:2], first, MESSAGES[3], {"role": "tool", "content": "/home"}, without_thoughts()[4]]
    row = {"instance_id": "i-1", "history": events, "report": {"resolved": True}, "git_patch": ""}
    return Written([row], group="i-1", reward=1.0, messages=messages, turns=(2, 5))


def openhands_sdk():
    """The SDK's events."""
    text = [{"type": "text", "text": "how many files?"}]
    call = {"id": "c1", "name": "ls", "arguments": json.dumps(CALL["arguments"]), "origin": "completion"}
    events = [
        {"kind": "SystemPromptEvent", "source": "agent", "system_prompt": {"type": "text", "text": "be brief"}},
        {"kind": "MessageEvent", "source": "user", "llm_message": {"role": "user", "content": text}},
        {
            "kind": "ActionEvent",
            "source": "agent",
            "thought": [{"type": "text", "text": "Looking."}],
            "reasoning_content": "I list them.",
            "action": {"kind": "TerminalAction", "command": "ls"},
            "tool_name": "ls",
            "tool_call_id": "c1",
            "tool_call": call,
            "llm_response_id": "r1",
        },
        {
            "kind": "ObservationEvent",
            "tool_call_id": "c1",
            "observation": {"content": [{"type": "text", "text": "a b"}]},
        },
        {"kind": "ConversationStateUpdateEvent", "key": "x", "value": 1},
        {
            "kind": "MessageEvent",
            "source": "agent",
            "llm_message": {
                "role": "assistant",
                "content": [{"type": "text", "text": "Two files."}],
                "reasoning_content": "a and b",
            },
        },
    ]
    row = {"instance_id": "i-1", "history": events, "test_result": {"report": {"resolved": False}}}
    return Written([row], group="i-1", reward=0.0, messages=MESSAGES[:5], turns=(2, 4))


def tau2_bench():
    """tau2-bench's results: a greeting that nobody sampled, a user with tools of its own."""
    greeting = {"role": "assistant", "content": "Hi!", "tool_calls": None, "cost": 0.0}
    user_call = {"role": "user", "content": None, "tool_calls": [{"id": "u1", **CALL, "requestor": "user"}]}
    raw = {"message": {"reasoning_content": "I list them."}}
    said = [
        greeting,
        MESSAGES[1],
        user_call,
        {"role": "tool", "id": "u1", "content": "on", "requestor": "user"},
        {**flat(without_thoughts())[2], "raw_data": raw, "turn_idx": 1},
        {"role": "tool", "id": "c1", "content": "a b", "requestor": "assistant", "error": False},
        {**without_thoughts()[4], "raw_data": {"thinking_blocks": [{"type": "thinking", "thinking": "a and b"}]}},
        *MESSAGES[5:],
    ]
    simulations = [
        {"id": str(trial), "task_id": "0", "trial": trial, "reward_info": {"reward": 1.0}, "messages": said}
        for trial in range(2)
    ]
    info = {"environment_info": {"domain_name": "x", "policy": "be brief", "tool_defs": None}}
    messages = [MESSAGES[0], {"role": "assistant", "content": "Hi!"}, *MESSAGES[1:]]
    document = {"timestamp": "t", "info": info, "tasks": [], "simulations": simulations}
    return Written([document], group="0", reward=1.0, messages=messages, turns=(3, 5, 7), conversations=2)


def inspect_ai():
    """A log of Inspect."""
    said = [{"id": str(i), **message} for i, message in enumerate(without_thoughts())]
    said[2] = {
        "role": "assistant",
        "source": "generate",
        "content": [{"type": "reasoning", "reasoning": "I list them."}, {"type": "text", "text": "Looking."}],
        "tool_calls": [{"id": "c1", "type": "function", "function": "ls", "arguments": CALL["arguments"]}],
    }
    said[4] = {
        **said[4],
        "content": [{"type": "reasoning", "reasoning": "a and b"}, {"type": "text", "text": "Two files."}],
    }
    sample = {"id": "s1", "epoch": 1, "input": "x", "messages": said, "scores": {"match": {"value": "C"}}}
    return Written([{"version": 2, "eval": {}, "samples": [sample]}], group="s1", reward=1.0)


def sharegpt():
    """ShareGPT's form: no thoughts, a call alone is a message."""
    entries = [
        {"from": "human", "value": "how many files?"},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": "a b"},
        {"from": "gpt", "value": "Two files."},
    ]
    messages = [dict(message) for message in without_thoughts()[:5]]
    messages[2]["content"] = ""
    return Written([{"conversations": entries, "system": "be brief"}], messages=messages, turns=(2, 4))


FORMS = {
    "messages": Written([{"group": "g", "reward": 2, "messages": MESSAGES}] * 2, "g", 2.0, conversations=2),
    "messages: JSON strings and nulls": Written([{"group": 1, "messages": with_strings()}], "1"),
    "messages: flat calls": Written([{"messages": flat()}]),
    "messages: calls as texts": Written(
        [{"messages": [{**m, "tool_calls": [json.dumps(CALL)]} if "tool_calls" in m else m for m in MESSAGES]}]
    ),
    "messages: one text": Written([{"messages": json.dumps(MESSAGES)}]),
    "requests": Written([{"messages": [MESSAGES[: turn + 1] for turn in TURNS], "reward": 1.0}], reward=1.0),
    "anthropic": Written([{"system": "be brief", "messages": blocks()}]),
    "nemo-gym": Written(nemo_gym(), "3", 0.5),
    "nemo-gym: input and output": Written([{"input": MESSAGES[:2], "output": items(), "reward": None}]),
    "swe-agent": swe_agent(queries=False),
    "swe-agent: queries": swe_agent(queries=True),
    "mini-swe-agent": mini_swe_agent(),
    "openhands": openhands(),
    "openhands: SDK": openhands_sdk(),
    "tau-bench": Written([{"task_id": 4, "trial": 0, "reward": 0.0, "info": {}, "traj": with_strings()}], "4", 0.0),
    "tau2-bench": tau2_bench(),
    "inspect": inspect_ai(),
    "sharegpt": sharegpt(),
    "prompt-completion": Written([{"prompt": MESSAGES[:2], "completion": MESSAGES[2:], "reward": 1}], reward=1.0),
    "prompt-completion: JSON": Written(
        [{"prompt": json.dumps(MESSAGES[:2]), "completion": json.dumps(MESSAGES[2:]), "example_id": 7}], "7"
    ),
    "prompt-completion: steps": Written(
        [
            {
                "prompt": MESSAGES[:2],
                "completion": MESSAGES[2:],
                "trajectory": [{"prompt": MESSAGES[:turn], "completion": [MESSAGES[turn]]} for turn in TURNS],
            }
        ]
    ),
}
