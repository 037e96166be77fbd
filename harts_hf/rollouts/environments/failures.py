"""Failures that cost an episode and not the run: their kinds, and how a call of an environment becomes one."""

import traceback
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

from harts_hf.errors import AllFailedError

Value = TypeVar("Value")
FailureKind = Literal["contract", "observation", "raised", "replay", "timeout"]
FAILURE_KINDS: tuple[FailureKind, ...] = get_args(FailureKind)


class ContractError(ValueError):
    """An environment returned something else than :class:`~harts_hf.rollouts.Environment` says."""


class ReplayError(ValueError):
    """An environment that was played again did not answer as it did before."""


class EpisodeFailure(Exception):
    """An episode that cannot go on.

    Attributes:
        kind: what it is counted as: ``contract`` (the environment returned what it may not), ``observation`` (one
            that is too long or that the chat template does not take), ``raised``, ``replay`` or ``timeout``.
    """

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind

    def described(self) -> str:
        """The failure with the traceback of what it came from, for logs."""
        if self.__cause__ is None:
            return str(self)
        return "".join(traceback.format_exception(self.__cause__)).strip()


class EpisodesFailedError(AllFailedError):
    """The environments of every episode of a collection failed."""


def guarded(call: Callable[[], Value]) -> Value:
    """Calls an environment.

    Raises:
        EpisodeFailure: for whatever it raises, ``SystemExit`` included.
        KeyboardInterrupt: the user's, which ends the run.
    """
    try:
        return call()
    except (EpisodeFailure, KeyboardInterrupt):
        raise
    except BaseException as error:
        kinds: list[tuple[type[BaseException], FailureKind]] = [(ContractError, "contract"), (ReplayError, "replay")]
        kind: FailureKind = next((kind for type_, kind in kinds if isinstance(error, type_)), "raised")
        raise EpisodeFailure(kind, described(error)) from error


def described(error: BaseException) -> str:
    """An exception in one line; its own text may fail too."""
    try:
        text: Any = str(error)
    except Exception:
        text = "(its text cannot be read)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
