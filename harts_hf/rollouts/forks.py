"""Fork policies: where the conversations of one prompt part, so that they make exactly the episodes asked for.

Sampling begins with one place, after the prompt, whose *share* is the number of episodes wanted. A policy is asked
twice: before each turn, how the share of a conversation is split over continuations of its history (:meth:`split`),
and, once all conversations of a prompt are over, where further ones begin if there are too few (:meth:`grow`). It
sees what was sampled for this prompt and nothing else, so its answers do not depend on what finishes first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, get_args

from harts_hf.rollouts.fork_tree import ForkTree, Place

EarlyEnds = Literal["repeat", "reroll"]
EARLY_ENDS: tuple[EarlyEnds, ...] = get_args(EarlyEnds)


class Growth(NamedTuple):
    """Continuations to sample from a place that has some already.

    Attributes:
        place: one that the policy keeps.
        shares: the share of each new continuation, at least 1.
    """

    place: Place
    shares: tuple[int, ...]


class ForkPolicy(Protocol):
    """Decides where conversations fork.

    Attributes:
        entropies: whether it looks at the entropies of turns.
    """

    entropies: bool

    def check(self, *, max_turns: int, num_episodes: int | None = None) -> None:
        """Checks itself against a collector's limit and, if given, the episodes per prompt.

        Raises:
            ValueError: it cannot work with them.
        """

    def split(self, turn: int, share: int) -> Sequence[int]:
        """The shares of the continuations that a conversation gets before a turn: ``[share]`` for no fork.

        Args:
            turn: the turn that begins, 0 the first.
            share: episodes that this conversation is asked for.

        Returns:
            At least one number of at least 1, together at most ``share``; what is left out is for :meth:`grow`.
        """

    def keeps(self, turn: int, shares: Sequence[int]) -> bool:
        """Whether :meth:`grow` may come back to a place that was split so: its environment is kept until then."""

    def grow(self, tree: ForkTree, missing: int) -> list[Growth]:
        """Where to go on, all conversations of a prompt being over.

        Args:
            tree: what was sampled.
            missing: episodes wanted less conversations that are over, at least 1.

        Returns:
            New continuations whose shares sum to at most ``missing``; each conversation that is over then stands for
            one episode. Nothing if they are to stand for their shares.
        """


def check_policy(policy: object) -> None:
    """Checks that something is a fork policy.

    Raises:
        ValueError: a text (the keys of recipes are none), a class, an object without the methods of
            :class:`ForkPolicy`.
    """
    expected = (
        "expected fork_policy to be an object such as NoForks(), EntropyForks(roots=4) or BudgetForks(tokens=500)"
    )
    if isinstance(policy, type):
        raise ValueError(f"{expected}, got the class {policy.__name__}")
    if isinstance(policy, str):
        raise ValueError(f"{expected}, got the text {policy!r} (texts are for recipes)")
    missing = [name for name in ("entropies", "check", "split", "keeps", "grow") if not hasattr(policy, name)]
    if missing:
        raise ValueError(f"{expected}, got {type(policy).__name__} without {', '.join(missing)}")


@dataclass(frozen=True, kw_only=True)
class TurnForks:
    """Forks before chosen turns.

    A conversation forks into ``branching[k]`` continuations before turn ``fork_turns[k]``, or fewer where it is asked
    for fewer episodes. The factors need not multiply to the number of episodes: with a smaller product the first
    fork is made wider, with a larger one the shares of a fork's branches, as equal as they can be, run out before its
    last forks.

    Attributes:
        branching: continuations at each fork.
        fork_turns: the turn (0 is the first) before which each fork happens, ascending, as many as ``branching``.
        early_ends: what becomes of the episodes that a conversation was asked for when it is over before a fork.
            ``"repeat"``: it stands for all of them (equal rows), so each history keeps its weight. ``"reroll"``: it
            stands for one, and the fork above it gets one more branch for the others, so that no two rows are copies.

    Raises:
        ValueError: factors below 1, fork turns that do not match or do not ascend, another ``early_ends``.
    """

    branching: tuple[int, ...]
    fork_turns: tuple[int, ...]
    early_ends: EarlyEnds = "repeat"
    entropies = False

    def __post_init__(self) -> None:
        if not self.branching or min(self.branching) < 1:
            raise ValueError(f"expected branching factors of at least 1, got {list(self.branching)}")
        if len(self.fork_turns) != len(self.branching):
            turns, factors = list(self.fork_turns), list(self.branching)
            raise ValueError(f"expected as many fork turns as branching factors, got {turns} for {factors}")
        if not all(a < b for a, b in zip((-1, *self.fork_turns), self.fork_turns, strict=False)):
            raise ValueError(f"expected ascending fork turns of at least 0, got {list(self.fork_turns)}")
        if self.early_ends not in EARLY_ENDS:
            raise ValueError(f"expected early_ends to be one of {', '.join(EARLY_ENDS)}, got {self.early_ends!r}")

    def check(self, *, max_turns: int, num_episodes: int | None = None) -> None:
        """Every fork turn must be one that a conversation can reach."""
        if self.fork_turns[-1] >= max_turns:
            raise ValueError(
                f"expected ascending fork turns in [0, max_turns = {max_turns}), got {list(self.fork_turns)}"
            )

    def split(self, turn: int, share: int) -> Sequence[int]:
        """Equal shares before a fork turn, larger ones first."""
        if turn not in self.fork_turns:
            return [share]
        fork = self.fork_turns.index(turn)
        leaves_below = math.prod(self.branching[fork + 1 :])
        return even_shares(share, min(share, max(self.branching[fork], -(-share // leaves_below))))

    def keeps(self, turn: int, shares: Sequence[int]) -> bool:
        """With ``"reroll"``, forks above conversations that may stand for several episodes, and the prompt."""
        return self.early_ends == "reroll" and max(shares) > 1 and (len(shares) > 1 or turn == 0)

    def grow(self, tree: ForkTree, missing: int) -> list[Growth]:
        """With ``"reroll"``, one more branch at the fork above each conversation that was over early."""
        if self.early_ends == "repeat":
            return []
        return [Growth(_fork_above(end), (end.share - 1,)) for end in tree.ends() if end.share > 1]


@dataclass(frozen=True)
class NoForks:
    """Independent conversations: they share the prompt and nothing else (what GRPO samples)."""

    entropies = False

    def check(self, *, max_turns: int, num_episodes: int | None = None) -> None:
        """Any numbers will do."""

    def split(self, turn: int, share: int) -> Sequence[int]:
        """All of them before the first turn."""
        return [1] * share

    def keeps(self, turn: int, shares: Sequence[int]) -> bool:
        """Never."""
        return False

    def grow(self, tree: ForkTree, missing: int) -> list[Growth]:
        """Nothing: none is ever missing."""
        return []


def even_shares(total: int, count: int) -> list[int]:
    """``total`` as a sum of ``count`` numbers that differ by at most 1, larger ones first."""
    return [total // count + (index < total % count) for index in range(count)]


def _fork_above(place: Place) -> Place:
    """The last place before ``place`` that forked while it was asked for more than one episode, or the prompt."""
    above = place.parent
    assert above is not None
    while above.parent is not None and len(above.children) == 1:
        above = above.parent
    return above
