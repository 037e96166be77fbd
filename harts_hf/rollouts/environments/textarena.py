"""Single-player games of TextArena, as they are.

Needs the extra ``environments`` (TextArena, Guertler et al., https://arxiv.org/abs/2504.11442). Games
that would download something, or ask a model of somebody else's, are refused before they are imported.
"""

import copy
import difflib
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from harts_hf.errors import MissingExtraError
from harts_hf.rollouts.environment import Environment, StepResult
from harts_hf.rollouts.environments.quiet import alone_and_quiet
from harts_hf.rollouts.environments.words import word_tokenizer, words_of

# Modules of games that cannot run offline; some download while they are imported.
_NLTK, _JUDGE = "downloads word lists (NLTK)", "asks a model of OpenRouter's"
_REFUSED = {
    **dict.fromkeys(("Codenames", "Crosswords", "DontSayIt", "Hangman", "LetterAuction", "SpellingBee"), _NLTK),
    **dict.fromkeys(("WordChains", "WordLadder", "WordSearch", "Wordle"), _NLTK),
    **dict.fromkeys(("Debate", "GuessWho", "ScenarioPlanning", "TwentyQuestions"), _JUDGE),
    "BabyAiText": "is BabyAI's, of which harts_hf.rollouts.environments.babyai makes better text",
}
# What a tiny model's tokenizer knows is read in so many games, after so many random actions.
_GAMES_READ, _TURNS_READ = 200, 12


class TextArenaEnvironment(Environment):
    """Any single-player game of TextArena that needs no network.

    The policy reads the game's own texts: its rules first (``rules=False``: what it says after them), then whatever it
    says after each action; wrong actions are answered by the game, which ends at the second in a row. Nothing is said
    twice, so use no observation wrapper. An action is the text of a turn; where the game's registration adds missing
    brackets, they are added (``5`` becomes ``[5]``). The seed decides everything random, and forks go on with the same
    luck for the same actions.

    Example::

        game = TextArenaEnvironment("GuessTheNumber-v0", game_kwargs={"max_number": 10})
        print(game.reset("GuessTheNumber-v0", seed=7))
        print(game.step("[5]").observation)  # The target number is higher.

    Args:
        games: ids of games to train on where there is no data set, one or several; each is a prompt.
        rules: show the game's rules.
        game_kwargs: keyword arguments of the game's class instead of those that it is registered with.
        unfinished_reward: of an episode that the game gives no number for: it was cut short by the collector's limits
            or, in a few games (Countdown, Cryptarithm, Slitherlink), ended by wrong actions.
        word_actions: what a tiny model may say, one word each; needed for :meth:`tokenizer` only.

    Raises:
        ImportError: TextArena is not installed.
        ValueError: a game that is not registered, needs a network, or is for several players; keyword arguments that
            it does not take.
    """

    def __init__(
        self,
        games: str | Sequence[str],
        *,
        rules: bool = True,
        game_kwargs: Mapping[str, Any] | None = None,
        unfinished_reward: float = 0.0,
        word_actions: Sequence[str] = (),
    ) -> None:
        self._games = [games] if isinstance(games, str) else list(games)
        if not self._games:
            raise ValueError("expected at least one game, got none")
        self._rules = rules
        self._game_kwargs = dict(game_kwargs or {})
        self._unfinished_reward = unfinished_reward
        self._word_actions = [str(action) for action in word_actions]
        for game in self._games:
            _check_game(game)
        self._game: Any = None
        self._luck: Any = None

    def reset(self, prompt: Any, *, seed: int) -> str:
        """Begins a game.

        Args:
            prompt: the id of a game, such as ``GuessTheNumber-v0``; also one that is not among ``games``.
            seed: decides everything random about it.

        Raises:
            ValueError: the prompt names no game that can be played here; the game does not take ``game_kwargs``.
        """
        _check_game(prompt)
        self._luck = random.Random(seed).getstate()
        self._game = self._with_own_luck(lambda: _begin(prompt, self._game_kwargs, seed))
        said = self._messages(with_rules=self._rules)
        # A prompt has at least one token.
        return said or prompt

    def step(self, action: str) -> StepResult:
        """Plays one turn."""
        done, _ = self._with_own_luck(lambda: self._game.step(action))
        return StepResult(self._messages(with_rules=False), done=bool(done))

    @property
    def reward(self) -> float:
        """The game's reward, for most games in [0, 1], or ``unfinished_reward`` if it has none."""
        reward = (self._game.state.rewards or {}).get(0)
        # Some games, ended by wrong actions, put their reason where the reward belongs.
        return float(reward) if isinstance(reward, int | float) else self._unfinished_reward

    def prompts(self) -> list[str]:
        """One prompt for each game: its id."""
        return list(self._games)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """A word-level tokenizer of what these games say while ``word_actions`` are played, and of those.

        Raises:
            ValueError: no ``word_actions``, or one that is not one word.
        """
        if not self._word_actions:
            raise ValueError(
                "expected word_actions, what a tiny model may say, for a tokenizer of its own; got none (or set "
                "model_name_or_path)"
            )
        for action in self._word_actions:
            if words_of([action]) != [action]:
                raise ValueError(f"expected word_actions of one word each, got {action!r}")
        texts, play = list(self._word_actions), random.Random(0)
        for game in self._games:
            for seed in range(_GAMES_READ):
                texts.append(self.reset(game, seed=seed))
                # Now and then a wrong one: the game has words for that, too.
                for action in play.choices(["", *self._word_actions], k=_TURNS_READ):
                    text, done = self.step(action)
                    texts.append(str(text))
                    if done:
                        break
        return word_tokenizer(words_of(texts))

    def _with_own_luck(self, play: Callable[[], Any]) -> Any:
        """Games draw from Python's global generator: it gets this game's state while they do."""
        with alone_and_quiet():
            others = random.getstate()
            random.setstate(self._luck)
            try:
                return play()
            finally:
                self._luck = random.getstate()
                random.setstate(others)

    def _messages(self, *, with_rules: bool) -> str:
        """What the game has said since it was last asked, one paragraph for each message."""
        from textarena import ObservationType

        unsaid = {ObservationType.PLAYER_ACTION} | (set() if with_rules else {ObservationType.PROMPT})
        messages = self._game.state.get_current_player_observation()
        # Some games note the policy's own action with its arguments in another order, so that the text is a number.
        texts = [text.strip() for _, text, kind in messages if isinstance(text, str) and kind not in unsaid]
        return "\n\n".join(texts)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TextArenaEnvironment":
        # The generator's state is a tuple of 625 numbers: shared, not copied number by number.
        twin = object.__new__(type(self))
        memo[id(self._luck)] = self._luck
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin


def _begin(game: str, kwargs: dict[str, Any], seed: int) -> Any:
    import textarena

    try:
        made = textarena.make(game, **kwargs)
    except TypeError as error:
        raise ValueError(f"game_kwargs do not fit {game}: {error}") from error
    # Its wheel lacks files of some games; others are written for a later Python.
    except (ImportError, OSError, SyntaxError) as error:
        raise ValueError(f"expected a game that this installation can make, got {game}: {error}") from error
    single = f"expected a game for one player that can be played with game_kwargs {kwargs}, got {game}"
    try:
        made.reset(num_players=1, seed=seed)
    except (AssertionError, ValueError, OSError) as error:
        raise ValueError(f"{single}: {error}") from error
    if not isinstance(made.state, textarena.SinglePlayerState):
        raise ValueError(f"{single}, whose state is a {type(made.state).__name__}")
    return made


def _check_game(game: Any) -> None:
    try:
        from textarena.envs.registration import ENV_REGISTRY
    except ImportError as error:
        raise MissingExtraError("TextArenaEnvironment", "textarena") from error
    if not isinstance(game, str) or game not in ENV_REGISTRY:
        close = difflib.get_close_matches(str(game), ENV_REGISTRY, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"expected the id of a TextArena game such as 'GuessTheNumber-v0', got {game!r}{hint}")
    entry_point = ENV_REGISTRY[game].entry_point
    module = entry_point.split(":")[0] if isinstance(entry_point, str) else entry_point.__module__
    folder = module.split(".")[2] if module.startswith("textarena.envs.") else ""
    if folder in _REFUSED:
        raise ValueError(f"expected a game that needs no network, got {game!r}, which {_REFUSED[folder]}")
