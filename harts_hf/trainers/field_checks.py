"""What the fields of a configuration may hold: kinds of values, said in words, and one check for all of them."""

import math
import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    """What a field may hold.

    Attributes:
        said: in words, as they stand in "expected gamma to be ...".
        holds: whether a value, of whatever type, is one.
    """

    said: str
    holds: Callable[[Any], bool]

    def or_none(self) -> "Kind":
        """The same, or None."""
        return Kind(f"{self.said}, or None", lambda value: value is None or self.holds(value))


def number(low: float = 0.0, high: float = math.inf, *, above: bool = False) -> Kind:
    """A finite number from ``low`` to ``high``, both included (``low`` not, if ``above``); no bool, no text."""
    said = f"in [{low:g}, {high:g}]" if high < math.inf else f"{'above' if above else 'of at least'} {low:g}"

    def holds(value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            return False
        try:
            found = float(value)
        except OverflowError:  # an integer that is none
            return False
        return math.isfinite(found) and (low < found if above else low <= found) and found <= high

    return Kind(f"a {'' if high < math.inf else 'finite '}number {said}", holds)


def integer(low: int) -> Kind:
    """An integer of at least ``low``; a float is none, whatever its value."""
    return Kind(
        f"an integer of at least {low}",
        lambda value: isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= low,
    )


def one_of(choices: Sequence[str]) -> Kind:
    """One of these texts."""
    return Kind(f"one of {', '.join(choices)}", lambda value: isinstance(value, str) and value in choices)


def _are_finite(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(map(number(-math.inf).holds, values))


NUMBERS = Kind("a list of finite numbers", _are_finite)
FRACTION = Kind("a number in [0, 1)", lambda value: number(high=1).holds(value) and value < 1)
FLAG = Kind("True or False", lambda value: isinstance(value, bool))
TEXT = Kind("a text", lambda value: isinstance(value, str))
PATH = Kind("a path", lambda value: isinstance(value, str | os.PathLike))


def check_fields(config: Any, kinds: Mapping[str, Kind]) -> None:
    """Checks those of some fields that a configuration has, by name.

    Raises:
        ValueError: one that holds something else; the message names it, what was expected and what came.
    """
    for name, kind in kinds.items():
        if hasattr(config, name) and not kind.holds(value := getattr(config, name)):
            raise ValueError(f"expected {name} to be {kind.said}, got {value!r}")
