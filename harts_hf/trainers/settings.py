"""Settings of a trainer as they were at each micro-step of an optimizer step.

A tree trainer computes the losses of all slices of an optimizer step at its end. A callback may have changed a setting
between the micro-steps (a schedule of ``epsilon``, of ``entropy_coef``); each slice's loss sees what TRL's would have
seen: numbers (NumPy's and tensors of one number too), strings, bools, enums and tuples of the trainer and of its
arguments. What is changed within an object (a list, a dictionary) reaches every slice.
"""

from collections.abc import Iterable
from enum import Enum
from functools import lru_cache
from itertools import compress, pairwise
from operator import is_not
from typing import Any

import numpy as np
import torch

# By owner ("trainer", "args") all attributes; what of them is a setting is looked at where one has changed.
Settings = dict[str, dict[str, Any]]
Key = tuple[str, str]

# What forwards read; one tree forward serves all slices of a step.
OF_THE_FORWARD = (("trainer", "temperature"), ("args", "temperature"), ("args", "cast_lm_head_to_fp32"))


def read_settings(trainer: Any) -> Settings:
    """All attributes now; hold them no longer than a step."""
    return {"trainer": dict(vars(trainer)), "args": dict(vars(trainer.args))}


class SettingsOfSlices:
    """Puts a trainer's settings back to what they were at each slice.

    Only what changed *between* two micro-steps is put back, so that what a loss itself counts or adapts goes on.

    Args:
        trainer: whose settings they are.
        taken: for each slice, what :func:`read_settings` gave at its micro-step.

    Raises:
        ValueError: a setting that forwards read changed between them.
    """

    def __init__(self, trainer: Any, taken: list[Settings]) -> None:
        self._trainer = trainer
        self._changes: list[dict[Key, Any]] = [_changed(before, after) for before, after in pairwise(taken)]
        changed = {key for change in self._changes for key in change}
        first = {(owner, name): taken[0][owner][name] for owner, name in changed if name in taken[0][owner]}
        for owner, name in OF_THE_FORWARD:
            if (owner, name) in changed:
                values = [one[owner][name] for one in taken]
                raise ValueError(
                    f"expected the same {name} throughout an optimizer step, got {values}: one forward serves all of "
                    "its micro-steps"
                )
        self._changes.insert(0, first)
        self._applied = len(taken) - 1

    def apply(self, number: int) -> None:
        """The settings of slice ``number``; slices are taken in order, from the first on again and again."""
        self._applied = number
        owners = {"trainer": self._trainer, "args": self._trainer.args}
        for (owner, name), value in self._changes[number].items():
            vars(owners[owner])[name] = value

    def restore(self) -> None:
        """The settings of now where an error came before the last slice; what a loss has adapted since stays."""
        for number in range(self._applied + 1, len(self._changes)):
            self.apply(number)


def _changed(before: Settings, after: Settings) -> dict[Key, Any]:
    """Settings that are others than before."""
    return {
        (owner, name): value
        for owner, attributes in after.items()
        for name, earlier, value in _replaced(before[owner], attributes)
        if _is_setting(value) and _is_setting(earlier) and not _same(earlier, value)
    }


def _replaced(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Name, object before and object now of attributes that hold another object; hundreds do not, of each slice."""
    if list(before) == list(after):
        names: Iterable[str] = compress(after, map(is_not, before.values(), after.values()))
    else:
        names = (name for name, value in after.items() if value is not before.get(name, value))
    return [(name, before[name], after[name]) for name in names]


def _is_setting(value: Any) -> bool:
    kind: Any = type(value)
    if _is_plain(kind):
        return True
    if issubclass(kind, torch.Tensor):
        return value.dim() == 0
    return issubclass(kind, tuple) and all(map(_is_setting, value))


@lru_cache(maxsize=1024)
def _is_plain(kind: type) -> bool:
    """Remembered by type, since every micro-step goes through some 400 attributes."""
    return kind is type(None) or issubclass(kind, bool | int | float | str | np.generic | Enum)


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, torch.Tensor):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other or (one != one and other != other))
