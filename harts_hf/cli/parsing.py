"""Command lines whose mistakes are told with the form that is wanted: argparse says "invalid int value: '4,2'"."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from typing import Any

_LEFT_OUT = "the following arguments are required: "
# By type: what a value is called, several of them, and an example of several.
_KINDS: dict[Any, tuple[str, str, str]] = {
    int: ("an integer", "integers", "4 2"),
    float: ("a number", "numbers", "0.5 1"),
    str: ("a text", "texts", "A B"),
}


class CommandParser(argparse.ArgumentParser):
    """A parser that says what an option takes, and what it got; mix it in before other parsers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "exit_on_error": False})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's.

        Raises:
            ValueError: an option without its value, or with one of another type.
        """
        try:
            return super().parse_known_args(args, namespace)
        except argparse.ArgumentError as error:
            words = sys.argv[1:] if args is None else args
            raise ValueError(_explained(error, self._actions, list(words))) from error

    def error(self, message: str) -> Any:
        """What argparse would print below its whole usage.

        Raises:
            ValueError: always.
        """
        left_out = message.removeprefix(_LEFT_OUT)
        said = message if left_out == message else f"expected {left_out}, got none"
        raise ValueError(f"{said} ({self.prog} --help says what there is)")


def _explained(error: argparse.ArgumentError, actions: Sequence[argparse.Action], words: Sequence[str]) -> str:
    action = next((one for one in actions if "/".join(one.option_strings) == error.argument_name), None)
    if action is None or not action.option_strings:
        return str(error)
    option = action.option_strings[0]
    given = _given(action, words)
    is_list = action.nargs == "+"
    if not given:
        return f"expected {'one or more values' if is_list else 'a value'} after {option}, got none"
    bad = [word for word in given if not _fits(action, word)]
    one, several, example = _KINDS.get(action.type or str, ("", "", ""))
    if action.choices is not None:
        quoted = [shlex.quote(str(choice)) for choice in action.choices]
        one, several, example = f"one of {', '.join(quoted)}", f"some of {', '.join(quoted)}", " ".join(quoted[:2])
    if not bad or not one:
        return str(error)
    if is_list:
        return f"expected {several} after {option}, with spaces between them, as in {option} {example}, got {bad[0]!r}"
    return f"expected {option} to be {one}, got {bad[0]!r}"


def _given(action: argparse.Action, words: Sequence[str]) -> list[str]:
    """The values that stand after the option, where it stands last."""
    given: list[str] = []
    takes = False
    for word in words:
        name, is_joined, value = word.partition("=")
        if name.startswith("--") and any(option.startswith(name) for option in action.option_strings):
            given, takes = [value] if is_joined else [], not is_joined
        elif word.startswith("--"):
            takes = False
        elif takes:
            given.append(word)
            takes = action.nargs == "+"
    return given


def _fits(action: argparse.Action, word: str) -> bool:
    try:
        value = action.type(word) if callable(action.type) else word
    except (TypeError, ValueError, argparse.ArgumentTypeError):
        return False
    return action.choices is None or value in action.choices
