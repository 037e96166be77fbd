"""How a conversation with an environment is written: its texts and the policy's turns, to token ids and back."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from harts_hf.rollouts.contract import check_text
from harts_hf.rollouts.engines.engine import SampledTurn
from harts_hf.rollouts.environment import Environment
from harts_hf.rollouts.environments.encoding import Encoder
from harts_hf.rollouts.environments.failures import ContractError, EpisodeFailure

LongObservations = Literal["cut", "fail"]
LONG_OBSERVATIONS: tuple[LongObservations, ...] = get_args(LongObservations)


@dataclass(frozen=True, kw_only=True)
class ObservationLimit:
    """What becomes of long observations, before they are tokenised.

    Attributes:
        max_characters: of an observation (of each message of one); None for no limit.
        long: longer ones are cut, half of it from the beginning and half from the end with a line between them that
            says so, or fail their episode.

    Raises:
        ValueError: another word, or a number below 1.
    """

    max_characters: int | None = None
    long: LongObservations = "cut"

    def __post_init__(self) -> None:
        if self.max_characters is not None and self.max_characters < 1:
            raise ValueError(f"expected max_observation_characters of at least 1 or None, got {self.max_characters}")
        if self.long not in LONG_OBSERVATIONS:
            raise ValueError(f"expected long_observations to be one of {LONG_OBSERVATIONS}, got {self.long!r}")


class Writer(ABC):
    """Writes conversations. Its methods are called by one thread.

    Args:
        tokenizer: the policy's.
        limit: of observations.

    """

    def __init__(self, tokenizer: Any, limit: ObservationLimit) -> None:
        self._tokenizer = tokenizer
        self._limit = limit
        self._encoder = Encoder(tokenizer)
        self._num_cut = 0

    @property
    def num_cut(self) -> int:
        """Observations that were cut so far."""
        return self._num_cut

    @abstractmethod
    def prompt(self, said: Any, environment: Environment, *, limit: int | None = None) -> list[int]:
        """What an environment says first: ``[P]`` token ids, P at least 1 and at most ``limit``.

        Raises:
            EpisodeFailure: something else than its contract says, no token, or more than ``limit``.
            ValueError: a tokenizer that such an environment cannot be played with.
        """

    @abstractmethod
    def action(self, turn: SampledTurn, history: Sequence[int], environment: Environment) -> Any:
        """What :meth:`Environment.step` is given for a turn of the policy.

        Args:
            turn: the turn.
            history: ``[L]`` token ids before it.
            environment: the running episode.
        """

    @abstractmethod
    def answer(self, observation: Any, turn: SampledTurn, environment: Environment, *, limit: int) -> list[int] | None:
        """Token ids from the end of a turn to where the next one begins; None for more than ``limit``.

        Raises:
            EpisodeFailure: an observation that is none, or is too long by itself.
            ValueError: a tokenizer that such an environment cannot be played with.
        """

    def decoded(self, turn: SampledTurn) -> str:
        """The text of a turn, special tokens left out."""
        return str(self._tokenizer.decode(list(turn.token_ids), skip_special_tokens=True))

    def limited(self, text: str) -> str:
        """An observation, cut if it is too long.

        Raises:
            EpisodeFailure: it is too long and must not be cut.
        """
        most = self._limit.max_characters
        if most is None or len(text) <= most:
            return text
        if self._limit.long == "fail":
            raise EpisodeFailure(
                "observation", f"expected an observation of at most {most:,} characters, got {len(text):,}"
            )
        self._num_cut += 1
        end = most // 2
        left_out = f"\n[... {len(text) - most:,} characters left out ...]\n"
        return text[: most - end] + left_out + text[len(text) - end :]

    def _prompt_ids(self, text: str, environment: Environment, limit: int | None) -> list[int]:
        name = type(environment).__name__
        ids = self._encoder.encode(text, limit)
        if ids is None:
            raise EpisodeFailure(
                "contract",
                f"expected {name}.reset to return at most {limit:,} tokens, which the model has positions for, got a "
                f"text of {len(text):,} characters",
            )
        if not ids:
            raise EpisodeFailure("contract", f"expected {name}.reset to return at least one token, got {text!r}")
        return ids


class PlainWriter(Writer):
    """Texts as they are: nothing is put between a turn and its observation, or taken out."""

    def prompt(self, said: Any, environment: Environment, *, limit: int | None = None) -> list[int]:
        checked(said, f"{type(environment).__name__}.reset to return a text")
        return self._prompt_ids(said, environment, limit)

    def action(self, turn: SampledTurn, history: Sequence[int], environment: Environment) -> str:
        return self.decoded(turn)

    def answer(self, observation: Any, turn: SampledTurn, environment: Environment, *, limit: int) -> list[int] | None:
        checked(observation, f"{type(environment).__name__}.step to return a text as observation")
        return self._encoder.encode(self.limited(observation), limit)


def checked(text: object, what: str) -> None:
    """Checks a text of an environment's.

    Raises:
        EpisodeFailure: it is none, or no UTF-8.
    """
    try:
        check_text(text, what)
    except ContractError as error:
        hint = "" if isinstance(text, str) or not isinstance(text, list) else " (chat=True writes messages)"
        raise EpisodeFailure("contract", f"{error}{hint}") from error
