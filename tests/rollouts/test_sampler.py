"""Sampled trees: leaf counts, forks, masks, limits, orders; on scripted environments and an engine without a model."""

import itertools
import math

import numpy as np
import pytest
from support.engines import SeededEngine
from support.sampling import beginnings, tree_sampler

from harts_hf.rollouts.engines.engine import EngineError
from harts_hf.rollouts.environment import Environment, StepResult
from harts_hf.rollouts.environments.shelf import ShelfEnvironment
from harts_hf.rollouts.forks import TurnForks
from harts_hf.tree import RolloutTree

TOKENIZER = ShelfEnvironment().tokenizer()
END = TOKENIZER.eos_token_id
PROMPTS = ("lamp wanted", "book", "cup wanted error look")


class Ragged(Environment):
    """Ends at a turn that the actions decide, and answers with observations of several lengths."""

    def __init__(self, *, last_turn=99):
        self._last_turn = last_turn
        self.actions = []

    def reset(self, prompt, *, seed):
        self.actions = []
        return prompt

    def step(self, action):
        self.actions.append(action)
        words = sum(map(len, action.split()))
        return StepResult("error " * (1 + words % 3), done=words % 5 == 0 or len(self.actions) > self._last_turn)

    @property
    def reward(self):
        return len(" ".join(self.actions)) / 100


def sample(policy, *, episodes=None, environments=None, seed=0, prompts=PROMPTS, engine=None, **limits):
    """Rollouts of one tree a prompt."""
    sampler = tree_sampler(
        engine or SeededEngine(len(TOKENIZER), END),
        TOKENIZER,
        policy=policy,
        limits=limits,
        num_episodes=math.prod(policy.branching) if episodes is None else episodes,
        seed=seed,
    )
    return sampler.sample(beginnings(environments or [Ragged() for _ in prompts], prompts))


def forks(branching=(3, 2, 2), fork_turns=(0, 1, 2), **options):
    return TurnForks(branching=branching, fork_turns=fork_turns, **options)


def turns_of(rollout):
    """The policy's turns as lists of token ids: runs of ones in the mask (this environment always answers)."""
    edges = [0, *rollout.env_mask, 0]
    starts = [i for i in range(len(rollout.env_mask)) if edges[i + 1] > edges[i]]
    ends = [i + 1 for i in range(len(rollout.env_mask)) if edges[i + 1] > edges[i + 2]]
    return [rollout.completion_ids[start:end] for start, end in zip(starts, ends, strict=True)]


@pytest.mark.parametrize(
    ("branching", "fork_turns"),
    [((3, 2, 2), (0, 1, 2)), ((4,), (0,)), ((1,), (0,)), ((2, 3), (1, 3)), ((2, 1, 2, 2), (0, 1, 3, 4))],
)
def test_every_tree_has_exactly_its_leaves(branching, fork_turns):
    """Early ends included, each prompt yields the product of the branching factors, tree by tree."""
    leaves = math.prod(branching)
    rollouts = sample(forks(branching, fork_turns))
    assert [rollout.tree for rollout in rollouts] == [tree for tree in range(3) for _ in range(leaves)]
    factors = dict(zip(fork_turns, branching, strict=True))
    for tree in range(3):
        below = [rollout for rollout in rollouts if rollout.tree == tree]
        paths = [rollout.path for rollout in below]
        assert paths == sorted(paths)
        assert all(set(rollout.fork_turns) <= set(fork_turns) for rollout in below)
        # A conversation that was over before a fork stands for all the leaves below its place.
        for rollout in below:
            reached = math.prod(factors[turn] for turn in rollout.fork_turns)
            assert paths.count(rollout.path) == leaves // reached
    if branching == (3, 2, 2):
        assert any(len(rollout.path) < 3 for rollout in rollouts), "no early end: the case is not covered"


def test_siblings_share_their_history_token_by_token():
    """Rows of a tree agree on all turns before the one that they part at, so sharing is what branching implies."""
    rollouts = sample(forks(fork_turns=(0, 1, 3)))
    for tree in range(3):
        leaves = [rollout for rollout in rollouts if rollout.tree == tree]
        for first, second in itertools.combinations(leaves, 2):
            branches = zip(first.path, second.path, strict=False)
            agreed = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], branches)))
            if first.path != second.path:
                common = first.fork_turns[agreed]
                assert turns_of(first)[:common] == turns_of(second)[:common]
                assert first.fork_turns[: agreed + 1] == second.fork_turns[: agreed + 1]
            else:
                assert first == second
        rows = RolloutTree.from_trajectories([leaf.prompt_ids + leaf.completion_ids for leaf in leaves])
        assert rows.sharing_ratio > 1.5


def test_masks_mark_what_the_policy_sampled():
    """Playing the masked-in turns again gives the masked-out words, the reward and the number of turns."""
    rollouts = sample(forks(), max_completion_tokens=200)
    assert any(0 in rollout.env_mask for rollout in rollouts)
    for rollout in rollouts:
        assert len(rollout.completion_ids) == len(rollout.logprobs) == len(rollout.env_mask) > 0
        assert [logprob < 0 for logprob in rollout.logprobs] == [mask == 1 for mask in rollout.env_mask]
        environment, replayed = Ragged(), []
        for turn in turns_of(rollout):
            assert len(turn) == 3 or turn[-1] == END
            observation, _ = environment.step(TOKENIZER.decode(turn, skip_special_tokens=True))
            replayed += [*turn, *TOKENIZER(observation)["input_ids"]]
        # The observation after the last turn is not shown.
        assert replayed[: len(rollout.completion_ids)] == rollout.completion_ids
        assert rollout.reward == environment.reward
        assert rollout.num_turns == len(environment.actions)


def test_equal_seeds_sample_equal_trees():
    """Sampling depends on the seed, not on global random state; no two requests have the same seed."""
    engine = SeededEngine(len(TOKENIZER), END)
    first = sample(forks(), seed=1, engine=engine)
    np.random.rand(3)
    assert first == sample(forks(), seed=1)
    assert first != sample(forks(), seed=2)
    seeds = [request.seed for request in engine.requests]
    assert len(set(seeds)) == len(seeds) > 20


@pytest.mark.parametrize("early_ends", ["repeat", "reroll"])
@pytest.mark.parametrize("order", ["last", "any"])
@pytest.mark.parametrize("at_once", [1, 5])
def test_the_order_in_which_turns_are_finished_changes_nothing(early_ends, order, at_once):
    """An engine that finishes the youngest request first, or any one, gives the same rollouts."""
    policy = forks(early_ends=early_ends)
    expected = sample(policy)
    for shuffle in range(3):
        engine = SeededEngine(len(TOKENIZER), END, order=order, at_once=at_once, shuffle=shuffle)
        assert sample(policy, engine=engine) == expected


def test_forks_are_one_request_and_conversations_do_not_wait():
    """Continuations of one history are one request; a turn is asked for as soon as the one before it is finished."""
    engine = SeededEngine(len(TOKENIZER), END, order="last")
    sample(forks(), engine=engine)
    assert [request.count for request in engine.requests[:3]] == [3, 3, 3]
    histories = [request.history for request in engine.requests]
    assert len(set(histories)) == len(histories)
    # The youngest first: the last tree is over before the others' second turn is asked for.
    prompts = [tuple(TOKENIZER(prompt)["input_ids"]) for prompt in PROMPTS]
    trees = [max(i for i, p in enumerate(prompts) if history[: len(p)] == p) for history in histories[3:]]
    assert trees == sorted(trees, reverse=True)


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 7, 11])
def test_no_completion_exceeds_its_limit(limit):
    """Completions end at the limit, never on an observation, and a turn that the limit cuts is not played."""
    environments = [Ragged() for _ in range(3)]
    rollouts = sample(forks(), max_completion_tokens=limit, environments=environments)
    assert len(rollouts) == 36
    for rollout in rollouts:
        assert 1 <= len(rollout.completion_ids) <= limit
        assert rollout.env_mask[-1] == 1
    if limit < 3:
        assert all(rollout.reward == 0 for rollout in rollouts if END not in rollout.completion_ids)


def test_turn_limits():
    """Turns are at most ``max_turn_tokens`` long, conversations at most ``max_turns``."""

    class Talkative(Ragged):
        def step(self, action):
            self.actions.append(action)
            return StepResult("error", done=False)

    environments = [Talkative() for _ in range(3)]
    rollouts = sample(forks((2,), (0,)), max_turns=4, max_turn_tokens=2, environments=environments)
    assert {rollout.num_turns for rollout in rollouts} == {4}
    for rollout in rollouts:
        assert len(turns_of(rollout)) == 4
        assert all(len(turn) == 2 or turn[-1] == END for turn in turns_of(rollout))


class Long(Ragged):
    """Answers with a text of five million characters."""

    def step(self, action):
        self.actions.append(action)
        return StepResult("lamp " * 1_000_000, done=False)


def test_an_observation_that_cannot_fit_is_not_even_encoded(monkeypatch):
    """It ends the conversation before the observation, as any that does not fit, and costs nothing."""
    lengths = []
    encode = type(TOKENIZER).__call__

    def recorded(self, text, **options):
        lengths.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(type(TOKENIZER), "__call__", recorded)
    rollouts = sample(forks(), environments=[Long() for _ in range(3)])
    assert {rollout.num_turns for rollout in rollouts} == {1}
    assert max(lengths) < 1000


@pytest.mark.parametrize("positions", [5, 6, 9, 14])
def test_no_conversation_outgrows_the_model(positions):
    """Its positions limit a conversation as ``max_completion_length`` does; the longest prompt here has four."""
    rollouts = sample(forks(), engine=SeededEngine(len(TOKENIZER), END, max_positions=positions))
    assert len(rollouts) == 36
    for rollout in rollouts:
        assert len(rollout.prompt_ids) + len(rollout.completion_ids) <= positions
        assert rollout.env_mask[-1] == 1


@pytest.mark.parametrize("limit", ["max_turns", "max_turn_tokens", "max_completion_tokens"])
def test_limits_that_allow_nothing(limit):
    """Limits are checked when they are made."""
    with pytest.raises(ValueError, match=f"expected {limit} of at least 1, got 0"):
        sample(forks(), **{limit: 0})


class Broken(SeededEngine):
    """Fails at its twentieth request."""

    def _turn(self, request, index):
        if len(self.requests) > 19:
            raise AssertionError("not reached")
        return super()._turn(request, index)

    def submit(self, request):
        future = super().submit(request)
        if len(self.requests) == 20:
            self._queue.pop()
            future.set_exception(EngineError("the server is gone"))
        return future


def test_errors_of_the_engine_are_raised():
    """As they are."""
    with pytest.raises(EngineError, match="the server is gone"):
        sample(forks(), engine=Broken(len(TOKENIZER), END))


def test_what_was_sampled_survives_an_error():
    """The conversations that were over can be read from the sampler that failed."""
    whole = sample(forks())
    engine = Broken(len(TOKENIZER), END, order="last")
    sampler = tree_sampler(engine, TOKENIZER, policy=forks(), num_episodes=12)
    with pytest.raises(EngineError, match="the server is gone"):
        sampler.sample(beginnings([Ragged() for _ in PROMPTS], PROMPTS))
    collected = sampler.rollouts()
    assert 0 < len(collected) < len(whole)
    assert all(rollout in whole for rollout in collected)
