"""Fork policies that look at what was sampled: some conversations first, then forks of those until there are enough.

Both grow a tree in rounds, each of which at most doubles the conversations of a prompt, so that those of a round are
sampled together and later rounds may fork what earlier ones brought. Forks stand before turns. Every place of a tree
keeps its environment until the tree is whole: one copy per turn.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harts_hf.rollouts.fork_tree import ForkTree, Place
from harts_hf.rollouts.forks import Growth


@dataclass(frozen=True, kw_only=True)
class EntropyForks:
    """Forks where the policy was least certain.

    Begins with ``roots`` independent conversations. Each round then forks the places whose turns had the highest
    entropy (the mean over a turn's tokens, in nats), places with fewer continuations first, so that each is forked
    once before any is forked again. EPTree (TreeRL, Hou et al., arXiv 2506.11902) forks at the tokens of highest
    entropy of whole conversations; ARPO (Dong et al., arXiv 2507.19849) while conversations run, where the entropy
    has risen after a tool's answer. Here a fork stands before a turn, and all turns of a prompt are compared.

    Attributes:
        roots: independent conversations at first; by default half of the episodes, rounded up.

    Raises:
        ValueError: ``roots`` below 1.
    """

    roots: int | None = None
    entropies = True

    def __post_init__(self) -> None:
        _check_roots(self.roots)

    def check(self, *, max_turns: int, num_episodes: int | None = None) -> None:
        """No more roots than episodes."""
        _check_roots(self.roots, num_episodes)

    def split(self, turn: int, share: int) -> Sequence[int]:
        """The roots before the first turn, and no forks on the way."""
        return [1] * (self.roots or -(-share // 2)) if turn == 0 else [share]

    def keeps(self, turn: int, shares: Sequence[int]) -> bool:
        """Always."""
        return True

    def grow(self, tree: ForkTree, missing: int) -> list[Growth]:
        """One more continuation at each of the least certain places."""
        entropy = {place: _mean_entropy(place) for place in tree.places() if place.children}
        widths = {place: len(place.children) for place in entropy}
        chosen: list[Place] = []
        for _ in range(_in_round(tree, missing)):
            chosen.append(min(entropy, key=lambda place: (widths[place], -entropy[place])))
            widths[chosen[-1]] += 1
        return _growths(chosen)


@dataclass(frozen=True, kw_only=True)
class BudgetForks:
    """Forks where a budget of tokens allows it, as early as it allows.

    Begins with ``roots`` independent conversations. What the budget has left is then divided equally over the episodes
    that are missing: a continuation is expected to take as many tokens as those through its place took from there on.
    Where a part pays for an independent conversation, one is begun; else the place with the fewest continuations of
    those that it pays for is forked, the earliest of several; where it pays for none, the cheapest place. So a large
    budget gives independent conversations and a small one late forks; what conversations that end early have not
    used is left to the others. Every prompt gets all its episodes, so a budget that is too small is exceeded, by the
    cheapest forks there are. (Tree-GRPO, Ji et al., arXiv 2509.21240, compares trees and independent conversations
    by such a budget, and forks at random turns.)

    Attributes:
        tokens: sampled tokens that a prompt's episodes should take together, shared ones once.
        roots: independent conversations at first; by default one.

    Raises:
        ValueError: ``tokens`` or ``roots`` below 1.
    """

    tokens: int
    roots: int | None = None
    entropies = False

    def __post_init__(self) -> None:
        _check_roots(self.roots)
        if self.tokens < 1:
            raise ValueError(f"expected a budget of at least 1 token, got {self.tokens}")

    def check(self, *, max_turns: int, num_episodes: int | None = None) -> None:
        """No more roots than episodes."""
        _check_roots(self.roots, num_episodes)

    def split(self, turn: int, share: int) -> Sequence[int]:
        """The roots before the first turn, and no forks on the way."""
        return [1] * (self.roots or 1) if turn == 0 else [share]

    def keeps(self, turn: int, shares: Sequence[int]) -> bool:
        """Always."""
        return True

    def grow(self, tree: ForkTree, missing: int) -> list[Growth]:
        """Continuations that the budget is expected to pay for."""
        cost = _costs_from(tree)
        left: float = self.tokens - sum(_num_sampled(place) for place in tree.places())
        widths = {place: len(place.children) for place in cost}
        chosen: list[Place] = []
        for index in range(_in_round(tree, missing)):
            allowance = left / (missing - index)
            paid = [place for place in cost if cost[place] <= allowance]
            if tree.root in paid:
                place = tree.root
            elif paid:
                place = min(paid, key=lambda paid: (widths[paid], -cost[paid]))
            else:
                place = min(cost, key=lambda any_: (cost[any_], widths[any_]))
            chosen.append(place)
            widths[place] += 1
            left -= cost[place]
        return _growths(chosen)


def _check_roots(roots: int | None, num_episodes: int | None = None) -> None:
    if roots is not None and (roots < 1 or (num_episodes is not None and roots > num_episodes)):
        most = "" if num_episodes is None else f" and at most {num_episodes}, the episodes of a prompt"
        raise ValueError(f"expected roots of at least 1{most}, got {roots}")


def _in_round(tree: ForkTree, missing: int) -> int:
    """Conversations that a round begins: at most as many as there are."""
    return min(missing, len(tree.ends()))


def _growths(chosen: Sequence[Place]) -> list[Growth]:
    return [Growth(place, (1,) * count) for place, count in Counter(chosen).items()]


def _num_sampled(place: Place) -> int:
    return 0 if place.sampled is None else len(place.sampled.token_ids)


def _mean_entropy(place: Place) -> float:
    """Nats per token of the turns that begin at ``place``."""
    entropies = []
    for child in place.children:
        assert child.sampled is not None
        if child.sampled.entropies is None:
            raise ValueError("expected an engine that gives the entropies of turns, as was asked for, got none")
        entropies.append(float(np.mean(child.sampled.entropies)))
    return float(np.mean(entropies))


def _costs_from(tree: ForkTree) -> dict[Place, float]:
    """Where turns began, the tokens sampled from there on: the mean over the conversations through each place."""
    places = list(tree.places())
    sums: Counter[Place] = Counter()
    ends: Counter[Place] = Counter()
    for place in reversed(places):  # what is below before what is above
        ends[place] += place.over
        if place.parent is not None:
            ends[place.parent] += ends[place]
            sums[place.parent] += sums[place] + ends[place] * _num_sampled(place)
    return {place: sums[place] / ends[place] for place in places if place.children}
