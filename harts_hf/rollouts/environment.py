"""What an environment is: a text game that the policy plays in turns, and that can be forked in the middle.

A worked example: guess a digit within two tries, with a hint after the first::

    class Digit(Environment):
        def reset(self, prompt: str, *, seed: int) -> str:
            self._secret, self._guess, self._tries = seed % 10, -1, 0
            return prompt  # the text that the policy reads first

        def step(self, action: str) -> StepResult:
            self._guess, self._tries = int(action) if action.isdigit() else -1, self._tries + 1
            hint = "higher" if self._guess < self._secret else "lower"
            return StepResult(hint, done=self._guess == self._secret or self._tries == 2)

        @property
        def reward(self) -> float:
            return float(self._guess == self._secret)

    game = Digit()
    game.reset("guess a digit", seed=7)
    game.step("4")       # StepResult("higher", done=False)
    twin = game.fork()   # both go on from the same state, and neither sees what the other does
"""

import copy
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeVar

from transformers import PreTrainedTokenizerBase

Thing = TypeVar("Thing")
# A message of a conversation, as chat templates take it: "role", "content", and what else its role has.
Message = dict[str, Any]


class StepResult(NamedTuple):
    """What an action led to.

    Attributes:
        observation: text that the policy reads next, not trained on; may be empty. Not shown when ``done``. Where
            turns are messages also a list of messages.
        done: the episode is over.
    """

    observation: str | list[Message]
    done: bool


class Environment(ABC):
    """A multi-turn text environment whose state can be forked; one instance is one running episode.

    Its texts are plain. Given to ``TreeRolloutCollector(..., chat=True)`` each is the content of a user message, and
    the tokenizer's chat template writes the marks around it; without that flag texts are shown as they are.

    What it raises, ``SystemExit`` included, costs its episode and not the run.

    Attributes:
        takes_messages: whether :meth:`step` gets messages instead of texts (:class:`ChatEnvironment`).
        tools: functions, or JSON schemas of such, that the chat template is to offer to the policy.
        has_reward: whether it knows its reward; where it does not, reward functions do, and ``reward`` is None.
    """

    takes_messages: bool = False
    tools: Sequence[Any] = ()
    has_reward: bool = True

    @property
    def offers_tools(self) -> bool:
        """Whether there are tools once an episode has begun; asked before one has."""
        return bool(self.tools)

    @abstractmethod
    def reset(self, prompt: Any, *, seed: int) -> str | list[Message]:
        """Begins an episode; called once, before any ``step``.

        Args:
            prompt: the ``prompt`` column of a dataset row, as it stands there.
            seed: decides everything random about the episode; the leaves of a tree share it, and it differs from
                group to group and from step to step.

        Returns:
            The text that the policy reads first; with a chat template also a list of messages, such as a system and
            a user message.
        """

    def begin(self, row: Mapping[str, Any], *, seed: int) -> str | list[Message]:
        """:meth:`reset` with the prompt of a dataset row. Override it where an episode depends on other columns.

        Args:
            row: at least ``prompt``; this package's trainers give all columns.
            seed: as for :meth:`reset`.
        """
        return self.reset(row["prompt"], seed=seed)

    @abstractmethod
    def step(self, action: Any) -> StepResult:
        """Plays one turn.

        Args:
            action: a text, that of the policy's turn with special tokens left out; anything may come, also an empty
                one. A wrong action is no error: answer it with an observation.
        """

    @property
    @abstractmethod
    def reward(self) -> float | None:
        """The episode's reward as things stand, a finite number; read once, when the episode is over or cut short."""

    def fork(self) -> Self:
        """A copy that goes on by itself. Override where a deep copy is slow, or wrong (handles, connections).

        What cannot be copied at all is played again from the start by
        :class:`~harts_hf.rollouts.ReplayedEnvironment`.
        """
        return copied(self)

    def close(self) -> None:  # noqa: B027  # most have nothing to free
        """Frees what the episode holds; called once nobody needs it any more, unless one of its calls hangs."""

    def for_rewards(self) -> Any:
        """What reward functions get of it as their ``environments``, or None."""
        return None

    def prompts(self) -> list[Any]:
        """Prompts to train on when the recipe names no data set.

        Raises:
            ValueError: this environment has none of its own.
        """
        raise ValueError(f"{type(self).__name__} has no prompts of its own: set dataset_name")

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """A tokenizer for a model that is built from scratch.

        Raises:
            ValueError: this environment has none of its own.
        """
        raise ValueError(f"{type(self).__name__} has no tokenizer of its own: set model_name_or_path")


class ChatEnvironment(Environment):
    """An environment whose turns are messages; the tokenizer's chat template writes all marks.

    Example::

        class Riddle(ChatEnvironment):
            def reset(self, prompt, *, seed):
                self._solved = False
                return [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": prompt}]

            def step(self, action):
                self._solved = "echo" in action["content"].lower()
                return StepResult("No. Try again.", done=self._solved)

            @property
            def reward(self):
                return float(self._solved)
    """

    takes_messages = True

    @abstractmethod
    def step(self, action: Message) -> StepResult:
        """Plays one turn.

        Args:
            action: the policy's turn as TRL's ``parse_response`` reads it: ``content``, and where there are any,
                ``reasoning_content`` and ``tool_calls`` (of ``{"type": "function", "function": {"name": ...,
                "arguments": {...}}}``).

        Returns:
            As observation a text, which becomes a user message, or messages (of roles ``user`` and ``tool``).
        """


# Makes a new environment: its class, or anything that can be called without arguments.
EnvironmentFactory = Callable[[], Environment]


def load_object(path: str) -> Any:
    """Imports what a dotted path names.

    Args:
        path: ``package.module:Name`` or ``package.module.Name``.

    Raises:
        ValueError: not such a path, no such module, or no such name in it.
    """
    module_name, separator, name = path.rpartition(":" if ":" in path else ".")
    if not separator or not name or not all(module_name.split(".")):
        raise ValueError(f"expected a dotted path such as package.module:Name, got {path!r}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A module that is there but lacks a dependency is another problem than a wrong path.
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise
        raise ValueError(f"cannot import {module_name!r} (from {path!r}): {error}") from error
    if not hasattr(module, name):
        raise ValueError(f"module {module_name!r} has no {name!r} (from {path!r})")
    return getattr(module, name)


def loaded(given: Any) -> Any:
    """``given``, or what it names if it is a dotted path: recipes have no other way to say an object.

    Raises:
        ValueError: as :func:`load_object`.
    """
    return load_object(given) if isinstance(given, str) else given


def copied(thing: Thing) -> Thing:
    """A deep copy.

    Raises:
        TypeError: it cannot be copied; says what to do instead.
    """
    try:
        return copy.deepcopy(thing)
    except Exception as error:
        raise TypeError(
            f"{type(thing).__name__} cannot be copied ({type(error).__name__}: {error}): give it a __deepcopy__, or "
            "play it again with ReplayedEnvironment"
        ) from error
