"""Chat messages to token ids by the tokenizer's template, and a check that none of them is lost on the way.

Templates skip what they do not know: roles, blocks of content, items that are no messages. A trajectory without them
is another one than the policy saw, so a part of a message that leaves no token is an error. Which parts do is found in
two steps: in one rendering each part carries a mark of its own, which is looked for in the decoded text; a part whose
mark is missing (or all of them, where nothing can be decoded) is then left out by itself, and lost if the token ids
stay the same.
"""

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from harts_hf.rollouts.fields import shortened

Message = dict[str, Any]
Render = Callable[[list[Message]], dict[str, Any]]
# Keys and list indices from a message to a part of it.
Path = tuple[str | int, ...]


def tokenize_messages(messages: Any, tools: Any, tokenizer: Any) -> tuple[list[int], list[int] | None]:
    """Token ids of a conversation, and the template's assistant mask where it marks generations.

    Arguments of tool calls may be objects or, as OpenAI's interface has them, JSON strings. A template that cannot
    take the strings gets the objects.

    Args:
        messages: a list of objects, as Transformers' ``apply_chat_template`` takes them.
        tools: a list of objects, or None.
        tokenizer: anything with ``apply_chat_template``; with ``decode`` too, the check costs one short rendering.

    Raises:
        ValueError: no tokenizer; other types than these; a template that fails; a message, or a part of one, that left
            no token. The text names the message by its number, counted from 1.
    """
    if tokenizer is None:
        raise ValueError("messages need a tokenizer, and none was given")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise ValueError("expected messages to be a non-empty list of objects")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError("expected tools to be a list of objects")
    for number, message in enumerate(messages, 1):
        _check_tool_calls(message, number)
    marks_generations = "{% generation" in (getattr(tokenizer, "chat_template", None) or "").replace("{%-", "{%")

    def render(messages: list[Message]) -> dict[str, Any]:
        encoded: dict[str, Any] = tokenizer.apply_chat_template(
            messages,
            tools=tools,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=marks_generations,
        )
        return encoded

    try:
        encoded = render(messages)
    except Exception as error:  # templates are programs: they raise what they like, jinja2's errors among them
        with_objects = _arguments_as_objects(messages)
        if with_objects == messages:
            raise ValueError(
                f"the chat template failed{_where_it_failed(render, messages, error)}: {error}"
            ) from error
        return tokenize_messages(with_objects, tools, tokenizer)
    ids = list(encoded["input_ids"])
    _check_nothing_is_lost(messages, ids, render, getattr(tokenizer, "decode", None))
    return ids, list(encoded["assistant_masks"]) if marks_generations else None


def _check_tool_calls(message: Message, number: int) -> None:
    calls = message.get("tool_calls")
    if calls is None:
        return
    if not isinstance(calls, list):
        raise ValueError(f"message {number}: expected tool_calls to be a list of objects, got {shortened(calls)}")
    for index, call in enumerate(calls, 1):
        what = f"message {number}: expected tool call {index} to be an object"
        if not isinstance(call, dict):
            raise ValueError(f"{what}, got {shortened(call)}")
        if not isinstance(call.get("function", {}), dict):
            raise ValueError(f"{what} whose function is an object, got {shortened(call['function'])}")


def _function(call: dict[str, Any]) -> Path:
    """Where a tool call has its name and arguments: some files leave the level of ``function`` out."""
    return ("function",) if "function" in call else ()


def _arguments_as_objects(messages: list[Message]) -> list[Message]:
    messages = copy.deepcopy(messages)
    for number, message in enumerate(messages, 1):
        for index, call in enumerate(message.get("tool_calls") or (), 1):
            function = _at(call, _function(call))
            if not isinstance(function.get("arguments"), str):
                continue
            what = f"message {number}: expected function.arguments of tool call {index} to be an object"
            try:
                arguments = json.loads(function["arguments"])
            except (ValueError, RecursionError) as error:
                got = shortened(function["arguments"])
                raise ValueError(f"{what}, or a JSON string of one, got {got} ({error})") from error
            if not isinstance(arguments, dict):
                raise ValueError(f"{what}, got {shortened(arguments)}")
            function["arguments"] = arguments
    return messages


def _where_it_failed(render: Render, messages: list[Message], error: Exception) -> str:
    """The first message with which the template fails in the same way."""
    for number in range(1, len(messages) + 1):
        try:
            render(messages[:number])
        except Exception as other:  # as above
            if str(other) == str(error):
                return f" at message {number}"
    return ""


class _Part(NamedTuple):
    """Something that a message says.

    Attributes:
        message: index of the message.
        what: its name in an error.
        said: where its text is; () for the message itself.
        whole: what is left out to see whether it leaves a token.
    """

    message: int
    what: str
    said: Path
    whole: Path


def _parts(index: int, message: Message) -> Iterator[_Part]:
    content = message.get("content")
    if isinstance(content, list):
        for i, block in enumerate(content):
            kind = f" (type {shortened(block['type'])})" if isinstance(block, dict) and "type" in block else ""
            yield _Part(index, f"content block {i + 1}{kind}", ("content", i), ("content", i))
    elif str(content or "").strip():
        yield _Part(index, "its content", ("content",), ("content",))
    for i, call in enumerate(message.get("tool_calls") or ()):
        path: Path = ("tool_calls", i, *_function(call))
        function = _at(message, path)
        if function.get("name"):
            yield _Part(index, f"tool call {i + 1}", (*path, "name"), ("tool_calls", i))
        if function.get("arguments") not in (None, "", "{}", {}):
            arguments = (*path, "arguments")
            hint = " (a JSON string: make it an object)" if isinstance(function["arguments"], str) else ""
            yield _Part(index, f"function.arguments of tool call {i + 1}{hint}", arguments, arguments)
    if message.get("function_call"):
        yield _Part(index, "its function_call", ("function_call",), ("function_call",))
    elif not {"content", "tool_calls"} & message.keys() and message.keys() - {"role"}:  # an item of another interface
        yield _Part(index, "all of it", (), ())


def _check_nothing_is_lost(
    messages: list[Message], ids: list[int], render: Render, decode: Callable[[list[int]], str] | None
) -> None:
    parts = [part for index, message in enumerate(messages) for part in _parts(index, message)]
    if decode is not None:
        parts = _without_marks(messages, parts, render, decode)
    lost = [part for part in parts if _is_lost(messages, part, ids, render)]
    if lost:
        role = messages[lost[0].message].get("role")
        more = f", nor did {len(lost) - 1} more parts of messages" if len(lost) > 1 else ""
        raise ValueError(
            f"message {lost[0].message + 1} ({'no role' if role is None else f'role {shortened(role)}'}): "
            f"{lost[0].what} left no token{more}; expected roles and content that the chat template knows"
        )
    if not ids:
        raise ValueError(f"expected messages that the chat template makes tokens of, got none from {len(messages)}")


def _without_marks(
    messages: list[Message], parts: list[_Part], render: Render, decode: Callable[[list[int]], str]
) -> list[_Part]:
    """The parts whose marks are not found in the text of one rendering."""
    marks = [f"q{number}q" for number in range(len(parts))]
    marked = list(messages)
    for part, mark in zip(parts, marks, strict=True):
        said = _at(messages[part.message], part.said)
        # Arguments may be numbers alone, but their names are free.
        is_arguments = part.said[-1:] == ("arguments",) and isinstance(said, dict)
        new = {mark: mark} if is_arguments else _marked(said, mark)
        marked[part.message] = _replaced(marked[part.message], part.said, new)
    try:
        text = decode(list(render(marked)["input_ids"]))
    except Exception:  # the template looks into what is said: then each part is looked at
        return parts
    return [part for part, mark in zip(parts, marks, strict=True) if mark not in text]


def _is_lost(messages: list[Message], part: _Part, ids: list[int], render: Render) -> bool:
    message = messages[part.message]
    if not part.whole:
        without = {key: value for key, value in message.items() if key == "role"}
    elif isinstance(part.whole[-1], int):
        *path, index = part.whole
        others = [entry for i, entry in enumerate(_at(message, path)) if i != index]
        without = _replaced(message, path, others)
    else:
        without = _replaced(message, part.whole, type(_at(message, part.whole))())
    try:
        return list(render([*messages[: part.message], without, *messages[part.message + 1 :]])["input_ids"]) == ids
    except Exception:  # the template cannot do without it
        return False


def _marked(value: Any, mark: str) -> Any:
    """``value`` with ``mark`` for each text in it, but what says which kind of object it is."""
    if isinstance(value, dict):
        return {key: entry if key in ("type", "role") else _marked(entry, mark) for key, entry in value.items()}
    if isinstance(value, list):
        return [_marked(entry, mark) for entry in value]
    return mark if isinstance(value, str) else value


def _at(value: Any, path: Sequence[str | int]) -> Any:
    for key in path:
        value = value[key]
    return value


def _replaced(value: Any, path: Sequence[str | int], new: Any) -> Any:
    """A copy of ``value`` with ``new`` at the end of ``path``."""
    if not path:
        return new
    twin = copy.copy(value)
    twin[path[0]] = _replaced(value[path[0]], path[1:], new)
    return twin
