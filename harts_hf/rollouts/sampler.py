"""Samples rollout trees: conversations that fork where a policy says, turn by turn, each going its own way."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from harts_hf.rollouts.contract import play_turn, read_reward
from harts_hf.rollouts.engines.engine import Engine, SampledTurn, TurnRequest
from harts_hf.rollouts.environment import Environment, StepResult
from harts_hf.rollouts.environments.failures import EpisodeFailure
from harts_hf.rollouts.environments.forking import LostEnvironment, fork_guarded
from harts_hf.rollouts.environments.texts import Writer
from harts_hf.rollouts.environments.workers import Workers
from harts_hf.rollouts.fork_tree import ForkTree, Place
from harts_hf.rollouts.forks import ForkPolicy
from harts_hf.rollouts.sampled import SampledRollout, rollout_of
from harts_hf.rollouts.seeds import seed_of
from harts_hf.rollouts.turn_limits import TurnLimits

# Makes an environment and begins its episode: the environment, and what it says first.
Beginning = Callable[[], tuple[Environment, Any]]
# What to do with what came of a call, or with its failure.
Take = Callable[[Any], None]


class TreeSampler:
    """Grows one tree per environment, all conversations of all trees in flight at once.

    What is sampled depends on the seed, the prompts, the environments and the policy, not on the order in which turns
    are finished: a turn's seed is made of its tree and its branches, and decisions wait for what they rest on.

    What an environment raises, returns or does not return costs the conversation in which it does; in the beginning,
    all conversations of the tree.

    Args:
        engine: samples the turns; open, and owned by the calling thread.
        writer: what environments say as token ids, and turns as they take them.
        workers: call the environments.
        policy: where to fork.
        limits: of each conversation.
        num_episodes: leaves that each tree is to have.
        seed: of everything that is drawn.
        failed_reward: the reward of conversations that failed after something was sampled.
        routes: whether the engine's routes are wanted.

    Attributes:
        num_out_of_room: conversations that were closed because the next observation did not fit.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        writer: Writer,
        workers: Workers,
        policy: ForkPolicy,
        limits: TurnLimits,
        num_episodes: int,
        seed: int,
        failed_reward: float | None = None,
        routes: bool = False,
    ) -> None:
        self._engine = engine
        self._writer = writer
        self._workers = workers
        self._policy = policy
        self._limits = limits
        self._num_episodes = num_episodes
        self._seed = seed
        self._failed_reward = failed_reward
        self._routes = routes
        self._trees: list[ForkTree] = []
        self._open: list[int] = []  # requests and calls in flight, by tree
        self._finished: deque[tuple[ForkTree, Future[Any], Take]] = deque()
        self.num_out_of_room = 0

    def sample(self, beginnings: Sequence[Beginning]) -> list[SampledRollout]:
        """Samples.

        Args:
            beginnings: one per tree.

        Returns:
            ``len(beginnings) * num_episodes`` rollouts, tree by tree, the leaves of a tree in depth-first order.

        Raises:
            ValueError: a policy that returns something else than its contract says; a tokenizer that these
                environments cannot be played with.
            EngineError: the engine could not sample.
        """
        for index in range(len(beginnings)):
            self._trees.append(ForkTree(index=index, root=Place(turn=0, share=self._num_episodes)))
            self._open.append(0)
        for tree, begin in zip(self._trees, beginnings, strict=True):
            self._call(tree, begin, partial(self._begin, tree))
        while any(self._open):
            self._engine.run(until=self._has_news)
            while self._finished:
                tree, future, take = self._finished.popleft()
                error = future.exception()
                if error is not None and not isinstance(error, EpisodeFailure):
                    raise error
                take(error or future.result())
                self._open[tree.index] -= 1
                if not self._open[tree.index]:
                    self._grow(tree)
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

    def close(self) -> None:
        """Closes the environments that somebody may still come back to."""
        for tree in self._trees:
            for place in tree.places():
                self._close(place.environment)
                place.environment = None

    def _has_news(self) -> bool:
        self._workers.expire()
        return bool(self._finished)

    def _await(self, tree: ForkTree, future: "Future[Any]", take: Take) -> None:
        self._open[tree.index] += 1
        # Called by whichever thread finishes the future; a deque may be appended to from any.
        future.add_done_callback(lambda done: self._finished.append((tree, done, take)))

    def _call(self, tree: ForkTree, call: Callable[[], Any], take: Take) -> None:
        """Has an environment called; ``take`` gets what it returned, or the failure that came of it."""
        self._await(tree, self._workers.submit(call), take)

    def _begin(self, tree: ForkTree, begun: tuple[Environment, Any] | EpisodeFailure) -> None:
        if isinstance(begun, EpisodeFailure):
            self._fail(tree.root, begun)
            return
        tree.root.environment, said = begun
        positions = self._engine.max_positions
        try:
            limit = None if positions is None else positions - 1  # and one token of the policy
            tree.root.answer_ids = self._writer.prompt(said, tree.root.environment, limit=limit)
        except EpisodeFailure as failure:
            self._fail(tree.root, failure)
        else:
            self._continue(tree, tree.root)

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
        seed = seed_of(self._seed, tree.index, *(step.branch for step in place.way()[1:]), first_branch)
        request = TurnRequest(
            history=history,
            max_tokens=min(self._limits.max_turn_tokens, self._room(tree, len(history))),
            seed=seed,
            count=len(shares),
            entropies=self._policy.entropies,
            routes_from=place.num_routed() if self._routes else None,
        )
        self._await(tree, self._engine.submit(request), partial(self._fork, tree, place, shares, first_branch))

    def _room(self, tree: ForkTree, length: int) -> int:
        """Tokens that fit after a history of ``length`` tokens."""
        room = self._limits.max_completion_tokens + len(tree.root.answer_ids) - length
        positions = self._engine.max_positions
        return room if positions is None else min(room, positions - length)

    def _fork(
        self, tree: ForkTree, place: Place, shares: Sequence[int], first_branch: int, turns: list[SampledTurn]
    ) -> None:
        """Takes the turns that a request led to: each gets an environment of its own."""
        environment = place.environment
        assert environment is not None and len(turns) == len(shares)
        children = []
        for branch, (share, turn) in enumerate(zip(shares, turns, strict=True), first_branch):
            children.append(Place(turn=place.turn + 1, share=share, parent=place, branch=branch, sampled=turn))
        place.children += children
        is_kept = bool(first_branch) or self._policy.keeps(place.turn, shares)
        if not is_kept:  # the first branch goes on with the environment itself: one copy fewer
            children[0].environment, place.environment = environment, None
        source, first = (place, None) if is_kept else (children[0], children[0])
        others = children if is_kept else children[1:]
        if others:
            take = partial(self._forked, tree, source, first, others)
            self._call(tree, partial(fork_guarded, environment, len(others)), take)
        else:
            self._play(tree, children[0])

    def _forked(
        self,
        tree: ForkTree,
        source: Place,
        first: Place | None,
        others: list[Place],
        twins: list[Environment | EpisodeFailure] | EpisodeFailure,
    ) -> None:
        """Goes on once the environment at ``source`` was forked: ``first`` with itself, the others with the twins."""
        if isinstance(twins, EpisodeFailure):  # it hangs, and nobody knows what it is doing
            source.environment = LostEnvironment(twins)
            twins = [twins] * len(others)
        if first is not None:
            self._play(tree, first)
        for place, twin in zip(others, twins, strict=True):
            if isinstance(twin, EpisodeFailure):
                self._fail(place, twin)
            else:
                place.environment = twin
                self._play(tree, place)

    def _play(self, tree: ForkTree, place: Place) -> None:
        """Plays the turn that led to ``place``, unless it was cut by the conversation's end."""
        turn, environment, parent = place.sampled, place.environment, place.parent
        assert turn is not None and environment is not None and parent is not None
        if turn.ended == "length" and len(turn.token_ids) != self._limits.max_turn_tokens:
            self._end(tree, place, cut=True)
            return
        action = self._writer.action(turn, parent.token_ids(), environment)
        self._call(tree, partial(play_turn, environment, action, parent.turn), partial(self._answered, tree, place))

    def _answered(self, tree: ForkTree, place: Place, result: StepResult | EpisodeFailure) -> None:
        """Goes on after an environment's answer, or ends the conversation."""
        if isinstance(result, EpisodeFailure):
            self._fail(place, result)
            return
        if result.done or place.turn >= self._limits.max_turns:
            self._end(tree, place, cut=not result.done)
            return
        assert place.sampled is not None and place.environment is not None
        room = self._room(tree, place.num_tokens()) - 1  # and one token of the policy
        try:
            ids = self._writer.answer(result.observation, place.sampled, place.environment, limit=room)
        except EpisodeFailure as failure:
            self._fail(place, failure)
            return
        if ids is None:
            self.num_out_of_room += 1
            self._end(tree, place, cut=True)
        else:
            place.answer_ids = ids
            self._continue(tree, place)

    def _end(self, tree: ForkTree, place: Place, *, cut: bool) -> None:
        assert place.environment is not None
        place.cut = cut
        self._call(tree, partial(read_reward, place.environment), partial(self._ended, place))

    def _ended(self, place: Place, reward: float | EpisodeFailure | None) -> None:
        if isinstance(reward, EpisodeFailure):
            self._fail(place, reward)
            return
        place.over, place.reward, place.ended, place.environment = True, reward, place.environment, None
        self._close(place.ended)

    def _fail(self, place: Place, failure: EpisodeFailure) -> None:
        """Ends a conversation whose environment failed."""
        place.over, place.failure = True, failure
        place.reward = None if place.sampled is None else self._failed_reward
        if failure.kind != "timeout":  # else its call may still be going on
            self._close(place.environment)
        place.environment = None

    def _close(self, environment: Environment | None) -> None:
        """Closes an environment; nobody waits for it, and what it raises changes nothing any more."""
        if environment is not None:
            self._workers.submit(environment.close)

    def _grow(self, tree: ForkTree) -> None:
        """Begins further conversations of a tree whose conversations are all over, if there are too few."""
        ends = tree.ends()
        missing = self._num_episodes - len(ends)
        growths = self._policy.grow(tree, missing) if missing and not tree.root.over else []
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
            self._close(place.environment)
            place.environment = None
