"""Reward functions that fail on one process alone, before a collective that the others would wait in."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from trl.trainer.utils import is_async_callable

from harts_hf.rollouts.arrays import number_array
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
            return _checked(function(*args, **kwargs), kwargs)
        except Exception as error:
            return failed(error, kwargs)

    async def guard_async(*args: Any, **kwargs: Any) -> Any:
        try:
            return _checked(await function(*args, **kwargs), kwargs)
        except Exception as error:
            return failed(error, kwargs)

    return _named(guard_async if is_async_callable(function) else guard, function)


def _named(guard: Function, function: Function) -> Function:
    return functools.update_wrapper(guard, function) if hasattr(function, "__name__") else guard


def _checked(rewards: Any, kwargs: Any) -> Any:
    """Rewards of which TRL can make a tensor."""
    if "prompts" not in kwargs:
        return rewards
    count = len(kwargs["prompts"])
    if not hasattr(rewards, "__iter__"):
        raise ValueError(f"expected {count} rewards, one per completion, got {shortened(rewards)}")
    found = list(rewards)
    if len(found) != count:
        raise ValueError(f"expected {count} rewards, one per completion, got {len(found)}")
    try:
        torch.tensor([torch.nan if one is None else one for one in found], dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        bad = next((one for one in found if one is not None and number_array([one]) is None), found)
        raise ValueError(f"expected rewards that are numbers or None, got {shortened(bad)}") from error
    return found
