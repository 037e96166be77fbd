"""Requests in the form of OpenAI's chat completions, read and checked: what the gateway takes, ignores and refuses."""

import json
from dataclasses import dataclass
from typing import Any

from harts_hf.rollouts.fields import shortened

Message = dict[str, Any]

MAX_STOPS = 16
MAX_CHOICES = 128
# The trainer decides how tokens are drawn, or its log-probs would be those of another policy.
SAMPLING_PARAMETERS = ("temperature", "top_p", "top_k", "min_p", "seed")
# They have no influence on what is sampled.
_WITHOUT_EFFECT = (
    "metadata",
    "model",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
# Parameters with one value that changes nothing; any other is refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
}
_READ = (
    "chat_template_kwargs",
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "n",
    "stop",
    "stream",
    "stream_options",
    "tool_choice",
    "tools",
)
_ROLES = ("system", "developer", "user", "assistant", "tool")


class ApiError(Exception):
    """An answer of the gateway that is no completion, in the form of OpenAI's errors.

    Attributes:
        status: of HTTP.
        code: what OpenAI's clients tell kinds of errors by, or None.
        param: the parameter that is meant, or None.
    """

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A chat completion that an agent asks for.

    Attributes:
        messages: as chat templates take them: contents are texts, ``developer`` is ``system``, arguments of tool calls
            are objects where they are JSON of one.
        tools: the tools on offer, or None.
        may_call: whether calls in an answer are parsed (``tool_choice`` "auto").
        count: choices, drawn independently.
        max_tokens: most tokens of an answer, or None.
        stop: texts that end an answer.
        stream: whether the answer is sent in chunks.
        include_usage: whether the last chunk says the usage.
        template_kwargs: further variables of the chat template.
        ignored: the sampling parameters that it set, which are the trainer's.
        body: the request as it came.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    may_call: bool = False
    count: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    template_kwargs: dict[str, Any]
    ignored: tuple[str, ...] = ()
    body: dict[str, Any]


def read_request(raw: bytes) -> ChatRequest:
    """Reads the body of a request.

    Raises:
        ApiError: no JSON in UTF-8, parameters that are not known or not supported (named), values of other types.
    """
    try:
        body = json.loads(raw.decode())
    except UnicodeDecodeError as error:
        raise ApiError(400, f"expected a body in UTF-8, got {error.reason} at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"expected a JSON object, got invalid JSON ({error})") from error
    if not isinstance(body, dict):
        raise ApiError(400, f"expected a JSON object, got {type(body).__name__}")
    _check_characters(body)
    body = {key: value for key, value in body.items() if value is not None}
    _check_parameters(body)
    tools = _tools(body)
    stream = _typed(body, "stream", bool, "true or false", False)
    options = _typed(body, "stream_options", dict, "an object", {})
    template_kwargs = _typed(body, "chat_template_kwargs", dict, "an object", {})
    reserved = {"messages", "tools", "tokenize", "add_generation_prompt", "conversation"} & template_kwargs.keys()
    if reserved:
        raise _refused("chat_template_kwargs", f"no {', '.join(sorted(reserved))}", template_kwargs)
    return ChatRequest(
        messages=_messages(body),
        tools=tools,
        may_call=tools is not None and body.get("tool_choice", "auto") == "auto",
        count=_count(body, "n", 1, MAX_CHOICES),
        max_tokens=_max_tokens(body),
        stop=_stop(body),
        stream=stream,
        include_usage=bool(options.get("include_usage")),
        template_kwargs=template_kwargs,
        ignored=tuple(name for name in SAMPLING_PARAMETERS if name in body),
        body=body,
    )


def _refused(param: str, expected: str, got: Any) -> ApiError:
    return ApiError(400, f"expected {param} to be {expected}, got {shortened(got)}", param=param)


def _check_characters(body: Any) -> None:
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        got = shortened(str(error.object)[error.start : error.end])
        raise ApiError(400, f"expected characters that UTF-8 has, got {got}") from error
    except RecursionError as error:
        raise ApiError(400, "expected a JSON object, got one that is nested too deeply") from error


def _check_parameters(body: dict[str, Any]) -> None:
    for name, value in body.items():
        if name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                neutral = " or ".join(map(repr, (*_NEUTRAL[name], None)))
                raise ApiError(
                    400,
                    f"{name} is not supported: expected {neutral}, got {shortened(value)}",
                    code="unsupported_parameter",
                    param=name,
                )
        elif name not in (*_READ, *SAMPLING_PARAMETERS, *_WITHOUT_EFFECT):
            raise ApiError(400, f"{name} is not supported", code="unsupported_parameter", param=name)


def _typed(body: dict[str, Any], name: str, kind: type, what: str, default: Any) -> Any:
    value = body.get(name, default)
    if not isinstance(value, kind):
        raise _refused(name, what, value)
    return value


def _count(body: dict[str, Any], name: str, default: int | None, largest: int | None = None) -> Any:
    value = body.get(name, default)
    if value is None:
        return None
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or value < 1 or (largest is not None and value > largest):
        limit = "at least 1" if largest is None else f"1 to {largest}"
        raise _refused(name, f"an integer of {limit}", value)
    return value


def _max_tokens(body: dict[str, Any]) -> int | None:
    limits = [_count(body, name, None) for name in ("max_completion_tokens", "max_tokens")]
    given = [limit for limit in limits if limit is not None]
    return min(given) if given else None


def _stop(body: dict[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop", [])
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise _refused("stop", "a text, or a list of texts that are not empty", stop)
    if len(texts) > MAX_STOPS:
        raise _refused("stop", f"at most {MAX_STOPS} texts", f"{len(texts)} texts")
    return tuple(texts)


def _tools(body: dict[str, Any]) -> list[dict[str, Any]] | None:
    tools = body.get("tools", [])
    if not isinstance(tools, list):
        raise _refused("tools", "a list", tools)
    for index, tool in enumerate(tools):
        function = (
            tool.get("function") if isinstance(tool, dict) and tool.get("type", "function") == "function" else None
        )
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _refused(f"tools[{index}]", "a function with a name", tool)
    choice = body.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        # Forcing a call needs constrained decoding: other tokens than the policy would have drawn.
        raise _refused("tool_choice", "'auto' or 'none'", choice)
    return tools or None


def _messages(body: dict[str, Any]) -> list[Message]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _refused("messages", "a list of at least one message", messages)
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise _refused(where, "an object", message)
    role = message.get("role")
    if role not in _ROLES:
        raise _refused(f"{where}.role", f"one of {', '.join(_ROLES)}", role)
    read: Message = {
        "role": "system" if role == "developer" else role,
        "content": _content(message.get("content"), f"{where}.content", optional=role == "assistant"),
    }
    if message.get("name") is not None:
        read["name"] = _text(message["name"], f"{where}.name")
    if role == "tool":
        read["tool_call_id"] = _text(message.get("tool_call_id"), f"{where}.tool_call_id")
    if role == "assistant":
        # OpenAI's own interface has no thinking; servers of open models say either.
        thinking = message.get("reasoning_content") or message.get("reasoning")
        if thinking is not None:
            read["reasoning_content"] = _text(thinking, f"{where}.reasoning_content")
        if message.get("tool_calls"):
            read["tool_calls"] = _calls(message["tool_calls"], f"{where}.tool_calls")
    return read


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _refused(where, "a text", value)
    return value


def _content(content: Any, where: str, *, optional: bool) -> str:
    if content is None and optional:
        return ""
    if not isinstance(content, list):
        return _text(content, where)
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            raise _refused(f"{where}[{index}]", "a part of the type text", kind)
        texts.append(_text(part.get("text"), f"{where}[{index}].text"))
    return "".join(texts)


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _refused(where, "a list", calls)
    read = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise _refused(f"{where}[{index}]", "a call of a function", call)
        name = _text(function.get("name"), f"{where}[{index}].function.name")
        arguments = _arguments(_text(function.get("arguments", ""), f"{where}[{index}].function.arguments"))
        read.append(
            {"id": str(call.get("id", "")), "type": "function", "function": {"name": name, "arguments": arguments}}
        )
    return read


def _arguments(text: str) -> Any:
    """OpenAI's interface has arguments as JSON strings, chat templates want objects."""
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    if not isinstance(arguments, dict):
        return text
    _check_characters(arguments)  # escapes in it are read only now
    return arguments
