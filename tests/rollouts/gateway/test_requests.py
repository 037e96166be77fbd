"""Requests as agents send them: what is read, ignored and refused."""

import json

import pytest
from support.agents import WEATHER

from harts_hf.rollouts.gateway.requests import ApiError, read_request

USER = {"role": "user", "content": "hi"}


def read(**fields):
    """A request with one message and these fields."""
    return read_request(json.dumps({"model": "policy", "messages": [USER], **fields}).encode())


def test_a_plain_request_has_the_defaults_of_openai():
    """One choice, no tools, nothing streamed; what is null is as absent."""
    request = read(stop=None, tools=None, n=None, logit_bias=None)
    assert request.messages == [USER]
    assert (request.count, request.max_tokens, request.stop, request.stream) == (1, None, (), False)
    assert request.tools is None and not request.may_call and request.ignored == ()


def test_messages_are_read_as_templates_take_them():
    """Parts of text are joined, developers are systems, arguments become objects, thinking has one name."""
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    broken = {"id": "c2", "type": "function", "function": {"name": "weather", "arguments": "{city"}}
    request = read(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
            {**USER, "name": "ann"},
            {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call, broken]},
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        ]
    )
    system, user, assistant, tool = request.messages
    assert system == {"role": "system", "content": "be brief"}
    assert user["name"] == "ann" and tool["tool_call_id"] == "c1"
    assert assistant["content"] == "" and assistant["reasoning_content"] == "hm"
    assert [entry["function"]["arguments"] for entry in assistant["tool_calls"]] == [{"city": "Paris"}, "{city"]


def test_sampling_parameters_are_the_trainers():
    """They are ignored and counted; those that change the distribution in other ways are refused."""
    request = read(temperature=0.1, top_p=0.5, seed=3, presence_penalty=0, user="x", store=True)
    assert request.ignored == ("temperature", "top_p", "seed")


def test_limits_and_stops():
    """The smaller of both limits counts; one stop may be a text."""
    request = read(max_tokens=9, max_completion_tokens=7, stop="END", n=3)
    assert (request.max_tokens, request.stop, request.count) == (7, ("END",), 3)
    assert read(stop=["a", "b"]).stop == ("a", "b")


def test_calls_are_parsed_only_where_they_may_be():
    """``tool_choice`` "none" keeps the tools in the prompt but not in the answer."""
    assert read(tools=[WEATHER]).may_call
    request = read(tools=[WEATHER], tool_choice="none")
    assert request.tools == [WEATHER] and not request.may_call


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"logprobs": True}, "logprobs"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"functions": []}, "functions"),
        ({"guided_json": {}}, "guided_json"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"n": 1000}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"stop": ["a", 1]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": {}}, "tools"),
        ({"tool_choice": "required", "tools": [WEATHER]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, "tool_choice"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_not_supported_is_named(fields, param):
    """An error in OpenAI's form that names the parameter."""
    with pytest.raises(ApiError) as error:
        read(**fields)
    body = error.value.body()["error"]
    assert error.value.status == 400
    assert body["param"] == param and body["type"] == "invalid_request_error"
    assert param.split("[")[0] in body["message"]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "invalid JSON"),
        (b"{", "invalid JSON"),
        (b"[]", "expected a JSON object, got list"),
        (b'{"messages": "\xff"}', "expected a body in UTF-8"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "expected characters that UTF-8 has"),
        (b"[" * 100_000, "invalid JSON"),
        (b'{"a": ' * 900 + b"1" + b"}" * 900, "nested too deeply|is not supported"),
        (b'{"n": ' + b"9" * 5000 + b"}", "invalid JSON"),
    ],
    ids=["empty", "cut", "list", "utf-8", "surrogate", "deep-list", "deep-object", "huge-number"],
)
def test_bodies_that_are_no_requests(raw, message):
    """Each is an answer of status 400, never an exception of another kind."""
    with pytest.raises(ApiError, match=message) as error:
        read_request(raw)
    assert error.value.status == 400
