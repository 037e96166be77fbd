"""Messages, blocks and items of other interfaces as chat messages."""

import json

import pytest
from support.chat import byte_tokenizer, text_of

from harts_hf.rollouts.files import read_rollout_file
from harts_hf.rollouts.readers.chat import chat_messages, tool_descriptions

CALL = {"type": "function_call", "call_id": "c", "name": "ls", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "a"}]}


def thought(text):
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}


def said(text):
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def turns(items):
    """The messages in short: role, thoughts, content, number of calls."""
    return [
        (m["role"], m.get("reasoning_content"), m["content"], len(m.get("tool_calls", ())))
        for m in chat_messages(items)
    ]


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([thought("t"), said("s"), CALL], [("assistant", "t", "s", 1)]),
        ([thought("t"), CALL, thought("u"), CALL, OUTPUT], [("assistant", "t\nu", "", 2), ("tool", None, "a", 0)]),
        ([CALL, OUTPUT, CALL], [("assistant", None, "", 1), ("tool", None, "a", 0), ("assistant", None, "", 1)]),
        ([said("s"), said("t")], [("assistant", None, "s", 0), ("assistant", None, "t", 0)]),
        ([said("s"), thought("t"), said("u")], [("assistant", None, "s", 0), ("assistant", "t", "u", 0)]),
        ([CALL, said("s")], [("assistant", None, "", 1), ("assistant", None, "s", 0)]),
        ([said("s"), said("")], [("assistant", None, "s", 0)]),
        ([{"type": "reasoning", "encrypted_content": "x", "summary": []}, said("s")], [("assistant", None, "s", 0)]),
        ([{"object": "response", "output": [thought("t"), said("s")]}], [("assistant", "t", "s", 0)]),
    ],
)
def test_items_of_one_turn_are_one_message(items, expected):
    """What the model wrote between two inputs; a text after a text, or after a call, begins another turn."""
    assert turns(items) == expected


def test_results_of_tools_stand_before_what_the_user_says_with_them():
    """In Anthropic's form both are blocks of the user's message, the results first."""
    content = [{"type": "tool_result", "tool_use_id": "c", "content": "a"}, {"type": "text", "text": "go on"}]
    assert [message["role"] for message in chat_messages([{"role": "user", "content": content}])] == ["tool", "user"]


@pytest.mark.parametrize(
    "block",
    [
        {"type": "tool_use", "input": {}},
        {"type": "tool_result", "content": "a"},
        {"type": "image", "source": {}},
        {"type": "tool_use", "name": "ls", "input": "x"},
    ],
)
def test_blocks_that_are_not_whole_stay(block):
    """So that whoever renders them sees that they leave no token."""
    (message,) = chat_messages([{"role": "user", "content": [block, {"type": "thinking", "thinking": "t"}]}])
    assert message["content"] == [block] and message["reasoning_content"] == "t"


@pytest.mark.parametrize(
    "tool",
    [
        {"name": "ls", "description": "lists", "input_schema": {"type": "object"}},
        {"type": "function", "name": "ls", "description": "lists", "parameters": {"type": "object"}},
        {"type": "function", "function": {"name": "ls", "description": "lists", "parameters": {"type": "object"}}},
    ],
    ids=["Anthropic", "Responses", "OpenAI"],
)
def test_descriptions_of_tools(tool):
    """Of three interfaces, as objects and as JSON strings."""
    function = {"name": "ls", "description": "lists", "parameters": {"type": "object"}}
    for tools in ([tool], json.dumps([tool]), [json.dumps(tool)]):
        assert tool_descriptions(tools) == [{"type": "function", "function": function}]
    assert tool_descriptions(None) is tool_descriptions([]) is tool_descriptions("") is None
    for tools in (3, [3], "x", ["x"], {"ls": tool}):
        with pytest.raises(ValueError, match="expected tools to be a list of objects"):
            tool_descriptions(tools)


def test_instructions_stand_first(tmp_path):
    """The Responses interface has them beside the input."""
    row = {"instructions": "be brief", "input": "go", "output": [said("ok")]}
    (tmp_path / "r.json").write_text(json.dumps(row))
    (rollout,) = read_rollout_file(tmp_path / "r.json", byte_tokenizer()).groups[0].rollouts
    assert text_of(rollout.token_ids).startswith(
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\ngo<|im_end|>"
    )


def test_an_output_that_repeats_its_input(tmp_path):
    """Some agents put their whole history into the output: it is there once, and only answers are trained."""
    given = [{"role": "system", "content": "s"}, {"role": "user", "content": "go"}]
    row = {"responses_create_params": {"input": given}, "response": {"output": [*given, said("ok")]}}
    (tmp_path / "r.json").write_text(json.dumps(row))
    (rollout,) = read_rollout_file(tmp_path / "r.json", byte_tokenizer()).groups[0].rollouts
    assert (
        text_of(rollout.token_ids).count("go") == 1 and text_of(rollout.token_ids[rollout.loss_mask])[:8] == "</think>"
    )


def test_an_answer_to_nothing_is_context(tmp_path):
    """A conversation that the assistant begins: nobody asked for that message."""
    messages = [{"role": r, "content": c} for r, c in (("assistant", "Hi"), ("user", "go"), ("assistant", "ok"))]
    (tmp_path / "r.json").write_text(json.dumps(messages))
    (rollout,) = read_rollout_file(tmp_path / "r.json", byte_tokenizer()).groups[0].rollouts
    assert "Hi" in text_of(rollout.token_ids) and "Hi" not in text_of(rollout.token_ids[rollout.loss_mask])


@pytest.mark.parametrize("weight", [0.5, 2, "0", [0]])
def test_weights_are_0_or_1(weight):
    """As in OpenAI's files: anything between would need a loss that knows it."""
    with pytest.raises(ValueError, match=r"message 1: expected a weight of 0 or 1, got "):
        chat_messages([{"role": "assistant", "content": "so", "weight": weight}])
    with pytest.raises(ValueError, match=r"message 1: expected a weight of 0 or 1, got "):
        chat_messages([{"type": "message", "role": "assistant", "content": "so", "weight": weight}])


def test_items_keep_the_weight_of_their_turn():
    """A turn of several items is context where one of them has weight 0."""
    answer = {"type": "message", "role": "assistant", "content": "so"}
    call = {"type": "function_call", "name": "f", "arguments": "{}", "weight": 0}
    ask = {"type": "message", "role": "user", "content": "go", "weight": 0}
    (_, first, _, second) = chat_messages([ask, {**answer, "weight": 0}, ask, answer])
    assert first["weight"] == 0 and "weight" not in second
    (turn,) = chat_messages([answer, call])
    assert turn["weight"] == 0
