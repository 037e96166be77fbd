"""What environments return, held to their contract: an episode that is none must not reach the training."""

import math
from typing import Any

import numpy as np

from harts_hf.rollouts.environment import Environment, StepResult
from harts_hf.rollouts.environments.failures import ContractError
from harts_hf.rollouts.fields import shortened

# Trainers hold rewards in float32.
_LARGEST_REWARD = float(np.finfo(np.float32).max)


def play_turn(environment: Environment, action: Any, turn: int) -> StepResult:
    """``environment.step(action)``, checked; its observation only if the episode is not over.

    Args:
        environment: the running episode.
        action: the policy's turn, as the environment takes it.
        turn: its index, for messages.

    Raises:
        ContractError: the environment returned something else than a :class:`StepResult` with a text, or messages.
    """
    result = environment.step(action)
    name = type(environment).__name__
    if not isinstance(result, tuple) or len(result) != 2:
        raise ContractError(f"expected {name}.step to return a StepResult, got {shortened(result)} (turn {turn})")
    observation, done = result
    if not isinstance(observation, list):
        check_text(observation, f"{name}.step to return a text as observation", f"turn {turn}")
    return StepResult(observation, bool(done))


def check_text(text: object, what: str, where: str = "") -> None:
    """Checks that ``text`` is one that a tokenizer can read.

    Raises:
        ContractError: another type, or characters that no UTF-8 has (lone surrogates).
    """
    place = f" ({where})" if where else ""
    if not isinstance(text, str):
        raise ContractError(f"expected {what}, got {shortened(text)}{place}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        got = shortened(text[error.start : error.end])
        raise ContractError(f"expected {what}, got the character {got} at position {error.start}{place}") from error


def read_reward(environment: Environment) -> float | None:
    """``environment.reward``, checked; None from one that has no reward of its own.

    Raises:
        ContractError: it is no finite number that float32 holds.
    """
    reward = environment.reward
    if reward is None and not environment.has_reward:
        return None
    return finite(reward, f"{type(environment).__name__}.reward")


def finite(number: Any, what: str) -> float:
    """A reward as somebody gave it.

    Raises:
        ContractError: it is no finite number that float32 holds.
    """
    try:
        # Of NumPy's and PyTorch's numbers, too, but not of a text.
        value = math.nan if isinstance(number, str | bytes) else float(number)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not abs(value) <= _LARGEST_REWARD:
        raise ContractError(f"expected {what} to be a finite number that float32 holds, got {shortened(number)}")
    return value


def fork_environment(environment: Environment) -> Environment:
    """``environment.fork()``, checked.

    Raises:
        ContractError: it returned itself, or no environment.
    """
    twin = environment.fork()
    if twin is environment or not isinstance(twin, Environment):
        got = "the environment itself" if twin is environment else shortened(twin)
        raise ContractError(f"expected {type(environment).__name__}.fork to return a copy, got {got}")
    return twin
