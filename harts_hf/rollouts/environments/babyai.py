"""BabyAI and MiniGrid levels as text: a mission, what lies where as seen from the agent, actions as words.

Needs the extra ``environments`` (minigrid); nothing is downloaded. The beginning of an episode in
sentences, for language models, and in few words, for tiny ones::

    Your mission: go to the red ball.                       go to the red ball : red ball 2 ahead 1 left
    You see a red ball 2 steps ahead and 1 step to the left.
    There is a wall 3 steps ahead, 2 steps to the left.
"""

import difflib
import random
from collections.abc import Collection, Sequence
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from harts_hf.errors import MissingExtraError
from harts_hf.rollouts.environment import Environment, StepResult
from harts_hf.rollouts.environments.grid_text import STYLES, Style, describe_view
from harts_hf.rollouts.environments.quiet import alone_and_quiet
from harts_hf.rollouts.environments.words import word_tokenizer, words_of

# minigrid's names of actions, which the policy may say, and what they are called in sentences. (`done` does nothing.)
ACTIONS = {
    "left": "turn left",
    "right": "turn right",
    "forward": "go forward",
    "pickup": "pick up",
    "drop": "drop",
    "toggle": "toggle",
}
_REWARDS = ("success", "discounted")
# What a tiny model's tokenizer knows is read in so many instances of each level, after so many random actions.
_INSTANCES_READ, _TURNS_READ = 200, 10
# Around an action, of the policy's making.
_MARKS = " \t.,:;!?*_`'\"()[]<>"

Reward = Literal["success", "discounted"]


class BabyAIEnvironment(Environment):
    """Any level of BabyAI or MiniGrid whose observation has a mission and a partial view, played in text.

    The last line of a turn is its action: ``turn left``, ``turn right``, ``go forward``, ``pick up``, ``drop`` or
    ``toggle`` (opens doors and boxes), or in short ``left``, ``right``, ``forward``, ``pickup``; case, punctuation
    around it and ``Action:`` before it do not matter. Anything else is answered (in sentences by the actions that
    there are, in words by ``error``) and is no step of the level. The instance of a level depends on the seed alone.

    Example::

        game = BabyAIEnvironment(levels="BabyAI-GoToRedBall-v0")
        print(game.reset("BabyAI-GoToRedBall-v0", seed=7))
        print(game.step("turn left").observation)

    Args:
        levels: ids of levels to train on where there is no data set, one or several; each is a prompt.
        style: ``sentences`` for language models, ``words`` for tiny ones: no rules, few words, no marks.
        actions: minigrid's names of the actions that there are, if not all of ``ACTIONS``: many levels need no more
            than ``left``, ``right`` and ``forward``.
        reward: ``success`` is 1 for a mission that was accomplished, ``discounted`` minigrid's own reward, which
            falls from 1 to 0.1 with the share of the level's steps that it took. 0 otherwise.
        level_kwargs: keyword arguments of the level's class, such as ``room_size`` or ``max_steps``.

    Raises:
        ImportError: minigrid is not installed.
        ValueError: a level that is not registered; a style, an action or a reward that is none of those above.
    """

    def __init__(
        self,
        levels: str | Sequence[str] = "BabyAI-GoToRedBallNoDists-v0",
        *,
        style: Style = "sentences",
        actions: Sequence[str] = tuple(ACTIONS),
        reward: Reward = "success",
        level_kwargs: dict[str, Any] | None = None,
    ) -> None:
        _check_choice("style", style, STYLES)
        _check_choice("reward", reward, _REWARDS)
        if isinstance(actions, str) or not actions:
            raise ValueError(f"expected actions to be a list of {', '.join(ACTIONS)}, got {actions!r}")
        for action in actions:
            _check_choice("actions", action, ACTIONS)
        self._levels = [levels] if isinstance(levels, str) else list(levels)
        if not self._levels:
            raise ValueError("expected at least one level, got none")
        self._style: Style = style
        self._actions = {action: ACTIONS[action] for action in actions}
        self._reward_kind = reward
        self._level_kwargs = dict(level_kwargs or {})
        for level in self._levels:
            _check_level(level)
        self._game: Any = None
        self._view: Any = None
        self._reward = 0.0

    def reset(self, prompt: Any, *, seed: int) -> str:
        """Begins an episode.

        Args:
            prompt: the id of a level, such as ``BabyAI-GoToRedBall-v0``; also one that is not among ``levels``.
            seed: decides which instance of the level it is.

        Raises:
            ValueError: the prompt names no level; the level's class does not take ``level_kwargs``; its observations
                have no mission.
        """
        _check_level(prompt)
        self._game = _make_level(prompt, self._level_kwargs)
        with alone_and_quiet():  # some levels print how they were drawn
            self._view, _ = self._game.reset(seed=seed)
        if not isinstance(self._view, dict) or not {"mission", "image"} <= self._view.keys():
            raise ValueError(f"expected a level whose observations have a mission and an image, got {prompt}")
        self._reward = 0.0
        mission = str(self._view["mission"])
        if self._style == "words":
            return f"{mission} : {self._describe()}"
        return (
            "You walk through rooms in which there are things, walls and doors. You see what is in front of you and "
            "beside you, as far as walls let you. In each turn you do one of these, and say it as the last line of "
            f"your answer: {self._offered()}. You can pick up, toggle (open, close) or go to what is 1 step "
            "ahead.\n\n"
            f"Your mission: {mission}.\n{self._describe()}"
        )

    def step(self, action: str) -> StepResult:
        """Plays one turn: the action in its last line."""
        name = self._read(action)
        if name is None:
            if self._style == "words":
                return StepResult("error", done=False)
            return StepResult(
                f"That is no action. The last line has to be one of these: {self._offered()}.", done=False
            )
        before = self._game.hash(size=64)
        self._view, reward, terminated, truncated, _ = self._game.step(self._game.actions[name])
        if terminated and reward > 0:
            self._reward = 1.0 if self._reward_kind == "success" else float(reward)
        text = self._describe()
        if self._style == "sentences" and self._game.hash(size=64) == before:
            text = f"Nothing happens. {text}"
        return StepResult(text, done=bool(terminated or truncated))

    @property
    def reward(self) -> float:
        """1, or minigrid's discounted reward, for an accomplished mission; else 0."""
        return self._reward

    def prompts(self) -> list[str]:
        """One prompt for each level: its id."""
        return list(self._levels)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """A word-level tokenizer of what these levels say; words that it has not seen are ``<unk>``."""
        texts, play = [], random.Random(0)
        for level in self._levels:
            for seed in range(_INSTANCES_READ):
                texts += [self.reset(level, seed=seed), str(self.step("").observation)]
                for action in play.choices(list(self._actions), k=_TURNS_READ):
                    text, done = self.step(action)
                    texts.append(str(text))
                    if done:
                        break
        # Small numbers stand for distances that were not met.
        numbers = [str(number) for number in range(1, self._view["image"].shape[0])]
        return word_tokenizer([*words_of([*self._actions, *texts]), *numbers])

    def _offered(self) -> str:
        phrases = list(self._actions.values())
        return " or ".join([", ".join(phrases[:-1]), phrases[-1]] if phrases[1:] else phrases)

    def _read(self, text: str) -> str | None:
        """minigrid's name of the action in the last line of ``text``; None if it is none."""
        lines = [line for line in text.splitlines() if line.strip()]
        said = lines[-1].lower().strip(_MARKS).removeprefix("action").strip(_MARKS) if lines else ""
        said = " ".join(said.split())
        return next((name for name, phrase in self._actions.items() if said in (name, phrase)), None)

    def _describe(self) -> str:
        carried = self._game.carrying
        held = None if carried is None else (carried.color, carried.type)
        return describe_view(self._view["image"], held, self._style)


def _check_choice(name: str, value: Any, known: Collection[str]) -> None:
    if value not in known:
        raise ValueError(f"expected {name} to be one of {', '.join(known)}, got {value!r}")


def _registry() -> Any:
    try:
        import minigrid  # noqa: F401  (registers its levels)
        from gymnasium.envs.registration import registry
    except ImportError as error:
        raise MissingExtraError("BabyAIEnvironment", "minigrid") from error
    return registry


def _check_level(level: Any) -> None:
    known = [name for name in _registry() if name.startswith(("BabyAI-", "MiniGrid-"))]
    if level not in known:
        close = difflib.get_close_matches(str(level), known, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(
            f"expected the id of a BabyAI or MiniGrid level such as 'BabyAI-GoToObj-v0', got {level!r}{hint}"
        )


def _make_level(level: str, kwargs: dict[str, Any]) -> Any:
    import gymnasium

    try:
        # Its checks of every step, and wrappers, are for those who write levels.
        return gymnasium.make(level, disable_env_checker=True, **kwargs).unwrapped
    except TypeError as error:
        raise ValueError(f"level_kwargs do not fit {level}: {error}") from error
    except gymnasium.error.DependencyNotInstalled as error:
        raise ImportError(f"{level} needs more than minigrid alone: {error}") from error
