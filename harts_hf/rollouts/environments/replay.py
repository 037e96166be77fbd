"""Forks by playing again, for environments that hold what cannot be copied: processes, connections, simulators."""

from collections.abc import Mapping
from typing import Any, Self

from harts_hf.rollouts.environment import Environment, EnvironmentFactory, Message, StepResult, copied, loaded
from harts_hf.rollouts.environments.failures import ReplayError
from harts_hf.rollouts.fields import shortened

# Characters shown before the first that differs.
_CONTEXT = 15


class ReplayedEnvironment(Environment):
    """Plays another environment; its forks begin a new one with the same seed and take the same actions.

    Of a history that is continued several times one continuation goes on with what is running, each of the others is
    played again from the start when it is needed: ``turns`` steps more. So the environment has to be deterministic,
    given its row, its seed and the actions. What it says is compared with what it said; another answer fails the
    episode (``environment/failed/replay``).

    Example::

        collector = TreeRolloutCollector(lambda: ReplayedEnvironment(Shell), branching=(4, 2), ...)

    Args:
        environment: makes the other environment; a dotted path will do.
        environment_kwargs: keyword arguments for it.
    """

    def __init__(
        self, environment: EnvironmentFactory | str, *, environment_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self._make = loaded(environment)
        self._kwargs = dict(environment_kwargs or {})
        self._running: Environment | None = self._new()
        self._look(self._running)
        self._row: Mapping[str, Any] = {}
        self._seed = 0
        self._said: Any = None
        self._played: list[tuple[Any, StepResult]] = []

    @property
    def offers_tools(self) -> bool:
        """The other environment's."""
        return self._awake().offers_tools

    def begin(self, row: Mapping[str, Any], *, seed: int) -> str | list[Message]:
        """Begins the other environment's episode."""
        self._row, self._seed, self._played = copied(dict(row)), seed, []  # an environment may write into its row
        running = self._awake()
        said = running.begin(row, seed=seed)
        self._said = copied(said)
        self._look(running)
        return said

    def reset(self, prompt: Any, *, seed: int) -> str | list[Message]:
        """:meth:`begin` with a row of the prompt alone."""
        return self.begin({"prompt": prompt}, seed=seed)

    def step(self, action: Any) -> StepResult:
        """Plays one turn of the other environment."""
        result = self._awake().step(action)
        self._played.append((action, result))
        return result

    @property
    def reward(self) -> float | None:
        """The other environment's."""
        return self._awake().reward

    def fork(self) -> Self:
        """A copy that goes on with what is running; this one is played again when it is asked for more."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._played = list(self._played)
        self._running = None
        return twin

    def close(self) -> None:
        """Closes the other environment."""
        if self._running is not None:
            self._running.close()

    def for_rewards(self) -> Any:
        """As the other environment."""
        return self._awake().for_rewards()

    def prompts(self) -> list[Any]:
        """The other environment's."""
        return self._awake().prompts()

    def tokenizer(self) -> Any:
        """The other environment's."""
        return self._awake().tokenizer()

    def _look(self, running: Environment) -> None:
        """Notes how to talk to it, so that nothing has to be played again for that."""
        self.takes_messages, self.has_reward = running.takes_messages, running.has_reward
        self.tools = running.tools

    def _new(self) -> Environment:
        return self._make(**self._kwargs)

    def _awake(self) -> Environment:
        """The other environment as it stands after what was played.

        Raises:
            ReplayError: it said something else this time.
        """
        if self._running is not None:
            return self._running
        running = self._new()
        try:
            _compare(running, running.begin(copied(self._row), seed=self._seed), self._said, "begin")
            for turn, (action, result) in enumerate(self._played):
                _compare(running, running.step(action), result, f"step of turn {turn}")
        except BaseException:
            running.close()
            raise
        self._running = running
        return running


def _compare(running: Environment, again: Any, before: Any, where: str) -> None:
    if again != before:
        new, old = repr(again), repr(before)
        same = next((at for at, pair in enumerate(zip(new, old, strict=False)) if pair[0] != pair[1]), len(old))
        start = max(same - _CONTEXT, 0)
        raise ReplayError(
            f"expected {type(running).__name__} to be deterministic, got {shortened(again)} from {where} instead of "
            f"{shortened(before)}, where they differ {new[start : start + 4 * _CONTEXT]!r} instead of "
            f"{old[start : start + 4 * _CONTEXT]!r}"
        )
