"""A check that no part of a message is lost between a conversation and its rendering by a chat template.

Templates skip what they do not know: roles, blocks of content, items that are no messages. A trajectory without them
is another one than the policy saw, so a part of a message that leaves no token is an error. Which parts do is found in
two steps: in one rendering each part carries a mark of its own, which is looked for in the text; a part whose mark is
missing (or all of them, where there is no text) is then left out by itself, and lost if the rendering stays the same.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from harts_hf.rollouts.fields import shortened

Message = dict[str, Any]
# A conversation as a template renders it: token ids, or text.
Rendering = list[int] | str
Render = Callable[[list[Message]], Rendering]
# Keys of a message that say nothing by themselves, and thoughts, which templates may leave out.
_ABOUT = {"role", "content", "tool_calls", "tool_call_id", "id", "name", "reasoning_content", "thinking", "reasoning"}
# Keys and list indices from a message to a part of it.
Path = tuple[str | int, ...]


def function_path(call: dict[str, Any]) -> Path:
    """Where a tool call has its name and arguments: some files leave the level of ``function`` out."""
    return ("function",) if "function" in call else ()


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
        path: Path = ("tool_calls", i, *function_path(call))
        function = at_path(message, path)
        if function.get("name"):
            yield _Part(index, f"tool call {i + 1}", (*path, "name"), ("tool_calls", i))
        if function.get("arguments") not in (None, "", "{}", {}):
            arguments = (*path, "arguments")
            hint = " (a JSON string: make it an object)" if isinstance(function["arguments"], str) else ""
            yield _Part(index, f"function.arguments of tool call {i + 1}{hint}", arguments, arguments)
    if message.get("function_call"):
        yield _Part(index, "its function_call", ("function_call",), ("function_call",))
    elif content is None and not message.get("tool_calls") and message.keys() - _ABOUT:
        # An item of another interface; Parquet gives it a content, too, which is null.
        yield _Part(index, "all of it", (), ())


def check_nothing_is_lost(
    messages: list[Message], rendered: Rendering, render: Render, decode: Callable[[Any], str] | None
) -> None:
    """Checks that each part of each message is in the rendering.

    Args:
        messages: the conversation.
        rendered: what ``render`` makes of it.
        render: of a conversation like it.
        decode: the text of a rendering; None where it has none.

    Raises:
        ValueError: parts of messages are not in it, or it is empty. The text names the first by its number, counted
            from 1, and counts the others.
    """
    parts = [part for index, message in enumerate(messages) for part in _parts(index, message)]
    if decode is not None:
        parts = _without_marks(messages, parts, render, decode)
    lost = [part for part in parts if _is_lost(messages, part, rendered, render)]
    if lost:
        role = messages[lost[0].message].get("role")
        more = f", nor did {len(lost) - 1} more parts of messages" if len(lost) > 1 else ""
        raise ValueError(
            f"message {lost[0].message + 1} ({'no role' if role is None else f'role {shortened(role)}'}): "
            f"{lost[0].what} left no token{more}; expected roles and content that the chat template knows"
        )
    if not rendered:
        raise ValueError(f"expected messages that the chat template makes tokens of, got none from {len(messages)}")


def _without_marks(
    messages: list[Message], parts: list[_Part], render: Render, decode: Callable[[Any], str]
) -> list[_Part]:
    """The parts whose marks are not found in the text of one rendering."""
    marks = [f"q{number}q" for number in range(len(parts))]
    marked = list(messages)
    for part, mark in zip(parts, marks, strict=True):
        said = at_path(messages[part.message], part.said)
        # Arguments may be numbers alone, but their names are free.
        is_arguments = part.said[-1:] == ("arguments",) and isinstance(said, dict)
        new = {mark: mark} if is_arguments else _marked(said, mark)
        marked[part.message] = _replaced(marked[part.message], part.said, new)
    try:
        text = decode(render(marked))
    except Exception:  # the template looks into what is said: then each part is looked at
        return parts
    return [part for part, mark in zip(parts, marks, strict=True) if mark not in text]


def _is_lost(messages: list[Message], part: _Part, rendered: Rendering, render: Render) -> bool:
    message = messages[part.message]
    if not part.whole:
        without = {key: value for key, value in message.items() if key in ("role", "content")}
    elif isinstance(part.whole[-1], int):
        *path, index = part.whole
        others = [entry for i, entry in enumerate(at_path(message, path)) if i != index]
        without = _replaced(message, path, others)
    else:
        without = _replaced(message, part.whole, type(at_path(message, part.whole))())
    try:
        return render([*messages[: part.message], without, *messages[part.message + 1 :]]) == rendered
    except Exception:  # the template cannot do without it
        return False


def _marked(value: Any, mark: str) -> Any:
    """``value`` with ``mark`` for each text in it, but what says which kind of object it is."""
    if isinstance(value, dict):
        return {key: entry if key in ("type", "role") else _marked(entry, mark) for key, entry in value.items()}
    if isinstance(value, list):
        return [_marked(entry, mark) for entry in value]
    return mark if isinstance(value, str) else value


def at_path(value: Any, path: Sequence[str | int]) -> Any:
    """What stands at the end of a path of keys and indices."""
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
