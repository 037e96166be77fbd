"""Forks of environments that may fail, and what stands for one that hangs."""

from functools import partial
from typing import Any

from harts_hf.rollouts.contract import fork_environment
from harts_hf.rollouts.environment import Environment, StepResult
from harts_hf.rollouts.environments.failures import EpisodeFailure, guarded


class LostEnvironment(Environment):
    """Stands for an environment that hangs in a call: whoever comes back to it fails as that call did."""

    def __init__(self, failure: EpisodeFailure) -> None:
        self._failure = failure

    def reset(self, prompt: Any, *, seed: int) -> str:
        raise self._failure

    def step(self, action: Any) -> StepResult:
        raise self._failure

    @property
    def reward(self) -> float:
        raise self._failure

    def fork(self) -> "LostEnvironment":
        raise self._failure


def fork_guarded(environment: Environment, count: int) -> list[Environment | EpisodeFailure]:
    """Forks an environment ``count`` times; one that fails does not take the others with it."""
    twins: list[Environment | EpisodeFailure] = []
    for _ in range(count):
        try:
            twins.append(guarded(partial(fork_environment, environment)))
        except EpisodeFailure as failure:
            twins.append(failure)
    return twins
