"""Samples rollout trees: conversations that fork where a policy says, turn by turn, each going its own way."""

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from harts_hf.rollouts.contract import check_text, fork_environment, play_turn, read_reward
from harts_hf.rollouts.engines.engine import Engine, SampledTurn, TurnRequest
from harts_hf.rollouts.environment import Environment
from harts_hf.rollouts.fork_tree import ForkTree, Place
from harts_hf.rollouts.forks import ForkPolicy
from harts_hf.rollouts.sampled import SampledRollout, rollout_of

# No token of any vocabulary is longer, so a text of more than so many characters per token is not even encoded.
_MAX_CHARACTERS_PER_TOKEN = 256
# Short answers recur (of siblings, "error"), and a tokenizer's call costs more than their tokens do.
_MAX_REMEMBERED_CHARACTERS = 256


@dataclass(frozen=True, kw_only=True)
class TurnLimits:
    """What a conversation may cost.

    Attributes:
        max_turns: a conversation is closed after so many turns, whatever the environment says.
        max_turn_tokens: a turn ends at an end token, or after so many tokens.
        max_completion_tokens: a conversation holds at most so many tokens after its prompt. Where an observation and
            one more token do not fit, it is closed before the observation; a turn that is cut by this limit (not by
            ``max_turn_tokens``) is not played. The engine's ``max_positions`` limit a conversation likewise.

    Raises:
        ValueError: numbers below 1.
    """

    max_turns: int
    max_turn_tokens: int
    max_completion_tokens: int

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_turn_tokens", "max_completion_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} of at least 1, got {getattr(self, name)}")


class TreeSampler:
    """Grows one tree per environment, all conversations of all trees in flight at once.

    What is sampled depends on the seed, the prompts, the environments and the policy, not on the order in which turns
    are finished: a turn's seed is made of its tree and its branches, and decisions wait for what they rest on.

    Args:
        engine: samples the turns; open, and owned by the calling thread.
        tokenizer: encodes what environments say (no special tokens added) and decodes turns for them.
        policy: where to fork.
        limits: of each conversation.
        num_episodes: leaves that each tree is to have.
        seed: of everything that is drawn.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        policy: ForkPolicy,
        limits: TurnLimits,
        num_episodes: int,
        seed: int,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._policy = policy
        self._limits = limits
        self._num_episodes = num_episodes
        self._seed = seed
        self._encoded: dict[str, list[int]] = {}
        self._trees: list[ForkTree] = []
        self._open: list[int] = []  # requests in flight, by tree
        self._finished: deque[tuple[Future[list[SampledTurn]], Callable[[list[SampledTurn]], None]]] = deque()

    def sample(self, environments: Sequence[Environment], texts: Sequence[str]) -> list[SampledRollout]:
        """Samples.

        Args:
            environments: reset, one per tree.
            texts: what each ``reset`` returned.

        Returns:
            ``len(environments) * num_episodes`` rollouts, tree by tree, the leaves of a tree in depth-first order.

        Raises:
            ValueError: a prompt without any token or of too many; an environment that returns something else than its
                contract says; a policy that does.
            EngineError: the engine could not sample.
        """
        prompts = [
            self._encode_prompt(text, environment, tree)
            for tree, (environment, text) in enumerate(zip(environments, texts, strict=True))
        ]
        self._open = [0] * len(prompts)
        for index, (ids, environment) in enumerate(zip(prompts, environments, strict=True)):
            root = Place(turn=0, share=self._num_episodes, answer_ids=ids, environment=environment)
            self._trees.append(ForkTree(index=index, root=root))
            self._continue(self._trees[-1], root)
        while any(self._open):
            self._engine.run(until=lambda: bool(self._finished))
            while self._finished:
                future, take = self._finished.popleft()
                take(future.result())
        return self.rollouts()

    def rollouts(self) -> list[SampledRollout]:
        """The conversations that are over, as :meth:`sample` returns them: also while it runs, and after it failed."""
        return [
            rollout
            for tree in self._trees
            for end in tree.ends()
            # Equal trajectories cost a tree trainer nothing.
            for rollout in (rollout_of(tree, end) for _ in range(end.share))
        ]

    def _encode_prompt(self, text: str, environment: Environment, tree: int) -> list[int]:
        name = type(environment).__name__
        check_text(text, f"{name}.reset to return a text", f"tree {tree}")
        positions = self._engine.max_positions
        ids = self._encode(text, None if positions is None else positions - 1)
        if ids is None:
            raise ValueError(
                f"expected {name}.reset to return fewer tokens than the {positions} positions of the model, got a "
                f"text of {len(text):,} characters (tree {tree})"
            )
        if not ids:
            raise ValueError(f"expected a prompt of at least one token, got {text!r} (tree {tree})")
        return ids

    def _encode(self, text: str, limit: int | None) -> list[int] | None:
        """Token ids of ``text``; None for more than ``limit``. A text that must have more is not encoded at all."""
        if limit is not None and len(text) > limit * _MAX_CHARACTERS_PER_TOKEN:
            return None
        ids = self._encoded.get(text)
        if ids is None:
            ids = list(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []
            if len(text) <= _MAX_REMEMBERED_CHARACTERS:
                self._encoded[text] = ids
        return list(ids) if limit is None or len(ids) <= limit else None

    def _continue(self, tree: ForkTree, place: Place) -> None:
        """Asks for the next turns of a conversation that has just come to ``place``."""
        shares = list(self._policy.split(place.turn, place.share))
        if not shares or min(shares) < 1 or sum(shares) > place.share:
            name = type(self._policy).__name__
            raise ValueError(
                f"expected {name}.split to return shares of at least 1, together at most {place.share}, got {shares}"
            )
        self._submit(tree, place, shares, first_branch=0)

    def _submit(self, tree: ForkTree, place: Place, shares: Sequence[int], *, first_branch: int) -> None:
        history = place.token_ids()
        # Which request this is, and nothing that depends on when it is made.
        key = (self._seed, tree.index, *(step.branch for step in place.way()[1:]), first_branch)
        request = TurnRequest(
            history=history,
            max_tokens=min(self._limits.max_turn_tokens, self._room(tree, len(history))),
            seed=_seed_of(key),
            count=len(shares),
            entropies=self._policy.entropies,
        )
        future = self._engine.submit(request)
        self._open[tree.index] += 1

        def take(turns: list[SampledTurn]) -> None:
            self._take(tree, place, shares, turns, first_branch)

        # Called by whichever thread finishes the future; a deque may be appended to from any.
        future.add_done_callback(lambda done: self._finished.append((done, take)))

    def _room(self, tree: ForkTree, length: int) -> int:
        """Tokens that fit after a history of ``length`` tokens."""
        room = self._limits.max_completion_tokens + len(tree.root.answer_ids) - length
        positions = self._engine.max_positions
        return room if positions is None else min(room, positions - length)

    def _take(
        self, tree: ForkTree, place: Place, shares: Sequence[int], turns: list[SampledTurn], first_branch: int
    ) -> None:
        """Plays the turns that a request led to, and goes on from there."""
        environment = place.environment
        assert environment is not None and len(turns) == len(shares)
        kept = bool(first_branch) or self._policy.keeps(place.turn, shares)
        # The first branch goes on with the environment itself where it can: one copy fewer.
        twins = [fork_environment(environment) if kept or branch else environment for branch in range(len(turns))]
        if not kept:
            place.environment = None
        for branch, (share, turn, twin) in enumerate(zip(shares, turns, twins, strict=True), first_branch):
            child = Place(turn=place.turn + 1, share=share, parent=place, branch=branch)
            child.sampled, child.environment = turn, twin
            place.children.append(child)
            self._play(tree, child)
            if not child.over:
                self._continue(tree, child)
        self._open[tree.index] -= 1
        if not self._open[tree.index]:
            self._grow(tree)

    def _play(self, tree: ForkTree, place: Place) -> None:
        """Plays the turn that led to ``place``: what the environment answers, or that the conversation is over."""
        turn, environment = place.sampled, place.environment
        assert turn is not None and environment is not None
        answer_ids = None
        if turn.ended != "length" or len(turn.token_ids) == self._limits.max_turn_tokens:
            action = str(self._tokenizer.decode(list(turn.token_ids), skip_special_tokens=True))
            observation, done = play_turn(environment, action, place.turn - 1)
            if not done and place.turn < self._limits.max_turns:
                room = self._room(tree, place.num_tokens())
                answer_ids = self._encode(observation, room - 1)  # and one token of the policy
        if answer_ids is not None:
            place.answer_ids = answer_ids
        else:
            place.over, place.reward, place.environment = True, read_reward(environment), None

    def _grow(self, tree: ForkTree) -> None:
        """Begins further conversations of a tree whose conversations are all over, if there are too few."""
        ends = tree.ends()
        missing = self._num_episodes - len(ends)
        growths = self._policy.grow(tree, missing) if missing else []
        shares = [share for growth in growths for share in growth.shares]
        name = type(self._policy).__name__
        if growths:
            if not shares or min(shares) < 1 or sum(shares) > missing:
                raise ValueError(
                    f"expected {name}.grow to return shares of at least 1, together at most {missing}, got {shares}"
                )
            for end in ends:
                end.share = 1
            at_place: dict[Place, list[int]] = {}
            for place, new in growths:
                at_place.setdefault(place, []).extend(new)
            for place, new_shares in at_place.items():
                if place.environment is None:
                    raise ValueError(
                        f"expected {name}.grow to return places that it keeps, got one before turn {place.turn}"
                    )
                self._submit(tree, place, new_shares, first_branch=len(place.children))
            return
        got = sum(end.share for end in ends)
        if got != self._num_episodes:
            raise ValueError(f"expected {name} to make {self._num_episodes} episodes of a prompt, got {got}")
        for place in tree.places():
            place.environment = None


def _seed_of(key: tuple[int, ...]) -> int:
    """32 bits that look independent for different keys."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=4).digest(), "little")
