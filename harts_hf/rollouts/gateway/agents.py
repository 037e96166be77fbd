"""Agents: what plays an episode; those that are functions in this process."""

import asyncio
import functools
import inspect
import math
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from harts_hf.rollouts.fields import shortened
from harts_hf.rollouts.gateway.formats import ChatFormat

_SHOWN_LINES = 12
# A coroutine that is cancelled has so long to clean up.
_CANCEL_SECONDS = 1.0

FailureKind = Literal["exit_code", "max_turns", "no_request", "raised", "reward", "timeout"]


@dataclass(frozen=True, kw_only=True)
class AgentAccess:
    """Where an episode's agent finds the policy.

    Attributes:
        base_url: as OpenAI's clients take it.
        api_key: likewise; the episode's own.
        model: the policy's name.
        seed: for whatever is random in the task; the same for the episodes of a group.
    """

    base_url: str
    api_key: str
    model: str
    seed: int

    def redacted(self, text: str) -> str:
        """A text without the key (which is also in the base URL)."""
        return text.replace(self.api_key, "***")


class AgentFailure(Exception):
    """An agent that did not come to its end; costs its episode, not the run.

    Attributes:
        kind: which of the kinds that are counted.
    """

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind


class Agent(ABC):
    """Something that plays episodes. :meth:`run` is called in a thread for each, many at a time.

    Attributes:
        grace: seconds beyond its time-out in which :meth:`run` is sure to return, if it sees to the time-out itself.
    """

    grace: float = 0.0

    @abstractmethod
    def run(self, task: Any, access: AgentAccess, *, timeout: float, stopped: threading.Event) -> Any:
        """Plays one episode.

        Args:
            task: the prompt, as it stands in the data set.
            access: where the policy is.
            timeout: seconds after which the episode is given up.
            stopped: set when nobody waits any more.

        Returns:
            What it says of the episode: a number (whatever has ``__float__``) is its reward.

        Raises:
            AgentFailure: it was given up, or says that it failed. (Any other exception counts as a failure too.)
        """

    def chat_format(self, tokenizer: Any) -> ChatFormat | None:
        """The chat format of the policy that this agent is made for; None for the model's own."""
        return None

    def prompts(self) -> list[Any]:
        """Tasks to train on when the recipe names no data set.

        Raises:
            ValueError: this agent has none of its own.
        """
        raise ValueError(f"{type(self).__name__} has no prompts of its own: set dataset_name")

    def tokenizer(self) -> Any:
        """A tokenizer for a model that is built from scratch.

        Raises:
            ValueError: this agent has none of its own.
        """
        raise ValueError(f"{type(self).__name__} has no tokenizer of its own: set model_name_or_path")


class FunctionAgent(Agent):
    """A function, or a coroutine function.

    It is called with the task and those of ``base_url``, ``api_key``, ``model`` and ``seed`` that it takes. A
    coroutine is cancelled at the time-out; a plain function cannot be ended: its requests are refused from then on,
    and its thread is left to itself.

    Args:
        function: the agent.

    Raises:
        ValueError: it takes neither ``base_url`` nor ``api_key``, or arguments that nobody gives it; a partial that
            gives arguments that its function does not take.
    """

    grace = 2 * _CANCEL_SECONDS

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        known = ("base_url", "api_key", "model", "seed")
        _check_partial(function)
        try:
            parameters = list(inspect.signature(function).parameters.values())[1:]
        except (TypeError, ValueError):  # of a callable without a signature
            self._takes: tuple[str, ...] = known
            return
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        names = [parameter.name for parameter in parameters]
        self._takes = known if takes_all else tuple(name for name in known if name in names)
        needed = [
            parameter.name
            for parameter in parameters
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            and parameter.name not in known
        ]
        if needed or "base_url" not in self._takes:
            raise ValueError(
                f"expected an agent that takes a task, base_url and any of {', '.join(known[1:])}, got one that takes "
                f"{', '.join(names) or 'nothing more'}"
            )

    def run(self, task: Any, access: AgentAccess, *, timeout: float, stopped: threading.Event) -> Any:
        given = {name: getattr(access, name) for name in self._takes}
        try:
            result = self._function(task, **given)
            return asyncio.run(_awaited(result, timeout)) if inspect.isawaitable(result) else result
        except _TimeOut:
            raise AgentFailure("timeout", f"not done after {timeout:g} s") from None
        except Exception as error:
            raise AgentFailure("raised", last_lines(traceback.format_exc())) from error


def _check_partial(function: Callable[..., Any]) -> None:
    """``agent_kwargs`` come as a partial, which takes whatever it is given until it is called."""
    if not isinstance(function, functools.partial):
        return
    try:
        signature = inspect.signature(function.func)
    except (TypeError, ValueError):  # of a callable without a signature
        return
    # The task is given by its place, so it is no keyword.
    try:
        signature.bind_partial(*function.args, "task", **function.keywords)
    except TypeError as error:
        name = getattr(function.func, "__name__", type(function.func).__name__)
        given = ", ".join(function.keywords) or "none"
        raise ValueError(f"expected arguments that {name} takes beside its task, got {given}: {error}") from error


class _TimeOut(BaseException):
    """No ``Exception``: an agent that catches those does not catch its own end."""


async def _awaited(result: Any, timeout: float) -> Any:
    task = asyncio.ensure_future(result)
    done, _ = await asyncio.wait({task}, timeout=timeout)
    if not done:
        task.cancel()
        await asyncio.wait({task}, timeout=_CANCEL_SECONDS)
        raise _TimeOut
    return task.result()


def last_lines(text: str) -> str:
    """The end of a text, for logs."""
    lines = text.strip().splitlines()[-_SHOWN_LINES:]
    return "last lines:\n" + "\n".join(line[:500] for line in lines) if lines else "it wrote nothing"


def checked_reward(value: Any) -> float | None:
    """A reward as somebody gave it.

    Raises:
        AgentFailure: it is no finite number, and not None.
    """
    if value is None:
        return None
    try:
        reward = math.nan if isinstance(value, str | bytes) else float(value)
    except Exception:  # of tensors and others that turn themselves into numbers
        reward = math.nan
    if not math.isfinite(reward):
        try:
            got = shortened(value)
        except Exception:  # of integers with thousands of digits
            got = type(value).__name__
        raise AgentFailure("reward", f"expected a finite number or None as reward, got {got}")
    return reward
