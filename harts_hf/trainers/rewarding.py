"""Reward functions that fail on one process alone, before a collective that the others would wait in."""

import functools
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn
from trl.trainer.utils import is_async_callable

from harts_hf.rollouts.fields import shortened

Function = Callable[..., Any]


def guarded(functions: Sequence[Function], errors: list[Exception]) -> list[Function]:
    """The same reward functions; one that raises, or returns what TRL would refuse, puts its error into ``errors``.

    It returns zeros instead, so that TRL reaches the collective in which processes exchange rewards. Reward *models*
    are left as they are.

    Args:
        functions: of a TRL trainer.
        errors: filled.
    """
    return [one if isinstance(one, nn.Module) else _guarded(one, errors) for one in functions]


def _guarded(function: Function, errors: list[Exception]) -> Function:
    def failed(error: Exception, kwargs: Any) -> list[Any]:
        if "prompts" not in kwargs:  # not as TRL calls it: how many rewards were wanted is not known
            raise error
        errors.append(error)
        return [0.0] * len(kwargs["prompts"])

    def guard(*args: Any, **kwargs: Any) -> Any:
        try:
            return _checked(function(*args, **kwargs), kwargs, function)
        except Exception as error:
            return failed(error, kwargs)

    async def guard_async(*args: Any, **kwargs: Any) -> Any:
        try:
            return _checked(await function(*args, **kwargs), kwargs, function)
        except Exception as error:
            return failed(error, kwargs)

    return _named(guard_async if is_async_callable(function) else guard, function)


def _named(guard: Function, function: Function) -> Function:
    return functools.update_wrapper(guard, function) if hasattr(function, "__name__") else guard


def _checked(rewards: Any, kwargs: Any, function: Function) -> Any:
    """Rewards of which TRL can make a tensor ``[count]``."""
    if "prompts" not in kwargs:
        return rewards
    count = len(kwargs["prompts"])
    name = getattr(function, "__name__", type(function).__name__)
    expected = f"expected {count} rewards from the reward function {name}, one number or None per completion"
    is_single = getattr(rewards, "ndim", 1) == 0  # of an array or a tensor, which all the same have __iter__
    if is_single or not hasattr(rewards, "__iter__") or isinstance(rewards, str | bytes | Mapping | Set):
        raise ValueError(f"{expected}, got {_described(rewards)}")
    found = list(rewards)
    if len(found) != count:
        raise ValueError(f"{expected}, got {len(found)}")
    try:
        tensor = torch.tensor([torch.nan if one is None else one for one in found], dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        bad = next((one for one in found if one is not None and not _is_number(one)), found)
        raise ValueError(f"{expected}, got {_described(bad)}") from error
    if tensor.ndim != 1:
        raise ValueError(f"{expected}, got {_described(found[0])} for a completion")
    return found


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    return not isinstance(value, str)


def _described(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is None:
        return shortened(value)
    return f"{shortened(value)} ({type(value).__name__} of shape {list(shape)})"
