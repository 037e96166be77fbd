"""The tree of a prompt while it is sampled: places where turns begin, and the turns between them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Optional

from harts_hf.rollouts.engines.engine import SampledTurn
from harts_hf.rollouts.environment import Environment
from harts_hf.rollouts.environments.failures import EpisodeFailure


@dataclass(eq=False, kw_only=True)
class Place:
    """A history: where a turn begins, or where a conversation is over.

    Attributes:
        turn: the turn that begins here, 0 after the prompt; at an end, the turns that were begun.
        share: episodes that the conversations through this place were asked for when it was reached; at an end, the
            episodes that the conversation stands for.
        parent: the place that the last turn began at; None after the prompt.
        branch: which of the parent's continuations leads here, 0 the first.
        sampled: the turn between the parent and this place; None after the prompt.
        answer_ids: token ids of the environment's answer to it (the prompt's, after the prompt); none at an end.
        environment: as things stand here; None where nothing will be sampled from here any more.
        children: the places that turns sampled from here lead to, by branch.
        over: whether the conversation is over.
        cut: whether a limit ended it, not its environment.
        reward: the environment's, if it is over; None where it has none.
        failure: why the episode could not go on, if that is why it is over.
        ended: the environment of a conversation that is over and did not fail.
    """

    turn: int
    share: int
    parent: Optional["Place"] = None
    branch: int = 0
    sampled: SampledTurn | None = None
    answer_ids: list[int] = field(default_factory=list)
    environment: Environment | None = None
    children: list["Place"] = field(default_factory=list)
    over: bool = False
    cut: bool = False
    reward: float | None = None
    failure: EpisodeFailure | None = None
    ended: Environment | None = None

    def way(self) -> list["Place"]:
        """The places from the prompt to this one, both included."""
        places = [self]
        while places[-1].parent is not None:
            places.append(places[-1].parent)
        return places[::-1]

    def token_ids(self) -> tuple[int, ...]:
        """``[L]`` token ids of the whole history, the prompt's included."""
        ids: list[int] = []
        for place in self.way():
            if place.sampled is not None:
                ids += place.sampled.token_ids
            ids += place.answer_ids
        return tuple(ids)

    def num_tokens(self) -> int:
        """The length of :meth:`token_ids`."""
        return sum(
            len(place.answer_ids) + (0 if place.sampled is None else len(place.sampled.token_ids))
            for place in self.way()
        )

    def num_routed(self) -> int:
        """Tokens whose routes the turns up to here say: those before the answer that were read."""
        return 0 if self.sampled is None else self.num_tokens() - len(self.answer_ids) - 1


@dataclass(eq=False, kw_only=True)
class ForkTree:
    """The conversations of one prompt.

    Attributes:
        index: of the prompt in the call.
        root: the place after the prompt.
    """

    index: int
    root: Place

    def places(self) -> Iterator[Place]:
        """All places, depth first, each before those below it, siblings by branch."""
        stack = [self.root]
        while stack:
            place = stack.pop()
            yield place
            stack += reversed(place.children)

    def ends(self) -> list[Place]:
        """The places where conversations are over, depth first."""
        return [place for place in self.places() if place.over]
