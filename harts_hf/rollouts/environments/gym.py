"""Environments with Gymnasium's interface, played by text."""

from collections.abc import Callable, Mapping
from typing import Any

from harts_hf.rollouts.environment import Environment, Message, StepResult, loaded
from harts_hf.rollouts.environments.failures import ContractError
from harts_hf.rollouts.fields import shortened


class GymTextEnvironment(Environment):
    """Plays an environment with Gymnasium's ``reset(seed=...)`` and ``step(action)``; the reward is their sum.

    Nothing of Gymnasium is imported, so whatever has these two methods will do.

    Example::

        def walk():
            return gymnasium.make("FrozenLake-v1", is_slippery=False)

        def parse(text):  # None, or a ValueError: an action that is none
            return ["left", "down", "right", "up"].index(text.strip().lower())

        def render(observation, info):
            return f"You are at field {observation}. left, down, right or up?"

        environment = lambda: GymTextEnvironment(walk, parse_action=parse, render=render)

    Args:
        make_env: makes the environment; a dotted path will do.
        parse_action: the action that a turn's text is; by default the text, stripped. Where it returns None or raises
            a ``ValueError``, the environment is not stepped: the policy reads ``invalid_action`` and may try again.
        render: the text that an observation and its info are; by default the observation, which then has to be one.
        invalid_action: what is answered to an action that is none; ``{action}`` stands for its text, ``{error}`` for
            what was raised.
        invalid_reward: what such an action adds to the reward.
        env_kwargs: keyword arguments for ``make_env``.

    Raises:
        ValueError: a dotted path that leads nowhere.
    """

    def __init__(
        self,
        make_env: Callable[..., Any] | str,
        *,
        parse_action: Callable[[str], Any] | str | None = None,
        render: Callable[[Any, Mapping[str, Any]], str] | str | None = None,
        invalid_action: str = "This is no action: {action}",
        invalid_reward: float = 0.0,
        env_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._parse: Callable[[str], Any] = loaded(parse_action) or str.strip
        self._render: Callable[[Any, Mapping[str, Any]], str] = loaded(render) or _as_text
        self._invalid_action = invalid_action
        self._invalid_reward = invalid_reward
        self._env = loaded(make_env)(**(env_kwargs or {}))
        self._reward = 0.0

    def reset(self, prompt: Any, *, seed: int) -> str | list[Message]:
        """Begins an episode.

        Returns:
            The prompt and, below it, the first observation. Of a prompt of messages, the last one's content goes on
            with it.
        """
        observation, info = self._env.reset(seed=seed)
        self._reward = 0.0
        text = self._render(observation, info)
        if not prompt:
            return text
        if isinstance(prompt, str):
            return f"{prompt}\n\n{text}"
        return [*prompt[:-1], {**prompt[-1], "content": f"{prompt[-1]['content']}\n\n{text}"}]

    def step(self, action: str) -> StepResult:
        """Plays one turn."""
        problem = ""
        try:
            parsed = self._parse(action)
        except ValueError as error:
            parsed, problem = None, str(error)
        if parsed is None:
            self._reward += self._invalid_reward
            return StepResult(self._invalid_action.format(action=action, error=problem), done=False)
        observation, reward, terminated, truncated, info = self._env.step(parsed)
        self._reward += float(reward)
        done = bool(terminated or truncated)
        return StepResult("" if done else self._render(observation, info), done=done)

    @property
    def reward(self) -> float:
        """The sum of the rewards so far."""
        return self._reward

    def close(self) -> None:
        """Closes the environment, if it can be."""
        close = getattr(self._env, "close", None)
        if close is not None:
            close()


def _as_text(observation: Any, info: Mapping[str, Any]) -> str:
    if not isinstance(observation, str):
        raise ContractError(f"expected an observation that is a text, or render, got {shortened(observation)}")
    return observation
