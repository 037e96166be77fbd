"""Sampled trees: leaf counts, forks, masks, log-probs, limits; on a tiny hybrid model and on scripted environments."""

import itertools
import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from support.models import tiny_model

from harts_hf.rollouts.decoding import LockstepDecoder, TokenSampler
from harts_hf.rollouts.environment import Environment, StepResult
from harts_hf.rollouts.environments.shelf import ShelfEnvironment
from harts_hf.rollouts.sampler import TreeSampler, TreeShape
from harts_hf.tree import RolloutTree

TOKENIZER = ShelfEnvironment().tokenizer()
END = TOKENIZER.eos_token_id
ARGS = SimpleNamespace(temperature=1.0, top_k=0, top_p=1.0, min_p=None, repetition_penalty=1.0)
# fp32 log-probs of cached decoding against one forward per trajectory; measured 1.4e-6 here, on log-probs near -3.
LOGPROB_BUDGET = 1e-5


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


def sample(shape, *, environments=None, seed=0, prompts=("lamp wanted", "book", "cup wanted error look"), **options):
    """Rollouts of one tree a prompt, and the model they were drawn from."""
    model = tiny_model("bailing_hybrid", vocab_size=len(TOKENIZER)).eval()
    environments = environments or [Ragged() for _ in prompts]
    texts = [environment.reset(prompt, seed=0) for environment, prompt in zip(environments, prompts, strict=True)]
    decoder = LockstepDecoder(model, pad_token_id=TOKENIZER.pad_token_id)
    sampler = TreeSampler(
        decoder=decoder,
        sampler=TokenSampler(ARGS, seed=seed, device=torch.device("cpu")),
        tokenizer=TOKENIZER,
        end_token_ids=[END],
        shape=shape,
        **options,
    )
    return sampler.sample(environments, texts), model


def shape(branching=(3, 2, 2), fork_turns=(0, 1, 2), **limits):
    return TreeShape(
        **{
            "branching": branching,
            "fork_turns": fork_turns,
            "max_turns": 5,
            "max_turn_tokens": 3,
            "max_completion_tokens": 40,
            **limits,
        }
    )


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
    wanted = shape(branching, fork_turns)
    rollouts, _ = sample(wanted)
    assert [rollout.tree for rollout in rollouts] == [tree for tree in range(3) for _ in range(wanted.num_leaves)]
    for tree in range(3):
        paths = [rollout.path for rollout in rollouts if rollout.tree == tree]
        assert paths == sorted(paths)
        # A conversation that was over before a fork stands for all the leaves below its place.
        for path, count in Counter(paths).items():
            assert count == math.prod(branching[len(path) :])
    if branching == (3, 2, 2):
        assert any(len(rollout.path) < 3 for rollout in rollouts), "no early end: the case is not covered"


def test_siblings_share_their_history_token_by_token():
    """Rows of a tree agree on all turns before the one that they part at, so sharing is what branching implies."""
    rollouts, _ = sample(shape())
    for tree in range(3):
        leaves = [rollout for rollout in rollouts if rollout.tree == tree]
        for first, second in itertools.combinations(leaves, 2):
            forks = zip(first.path, second.path, strict=False)
            common = len(list(itertools.takewhile(lambda branches: branches[0] == branches[1], forks)))
            # Fork k stands before turn k: paths that agree on the first k forks have turns 0 to k - 1 in common.
            assert turns_of(first)[:common] == turns_of(second)[:common]
        rows = RolloutTree.from_trajectories([leaf.prompt_ids + leaf.completion_ids for leaf in leaves])
        assert rows.sharing_ratio > 1.5


def test_masks_mark_what_the_policy_sampled():
    """Playing the masked-in turns again gives the masked-out words, the reward and the number of turns."""
    rollouts, _ = sample(shape(max_completion_tokens=200))
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


def test_recorded_logprobs_are_the_models():
    """Log-probs recorded while sampling equal those of one forward per trajectory."""
    rollouts, model = sample(shape())
    worst = 0.0
    for rollout in rollouts:
        ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids])
        with torch.no_grad():
            logprobs = model(input_ids=ids).logits[0, len(rollout.prompt_ids) - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(1, ids[0, len(rollout.prompt_ids) :, None])[:, 0]
        sampled = torch.tensor(rollout.env_mask, dtype=torch.bool)
        worst = max(worst, float((expected - torch.tensor(rollout.logprobs))[sampled].abs().max()))
    assert worst < LOGPROB_BUDGET


def test_equal_seeds_sample_equal_trees():
    """Sampling depends on the seed and the policy, not on global random state."""
    first, _ = sample(shape(), seed=1)
    torch.rand(3)
    again, _ = sample(shape(), seed=1)
    other, _ = sample(shape(), seed=2)
    assert first == again
    assert first != other


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 7, 11])
def test_no_completion_exceeds_its_limit(limit):
    """Completions end at the limit, never on an observation, and a turn that the limit cuts is not played."""
    environments = [Ragged() for _ in range(3)]
    rollouts, _ = sample(shape(max_completion_tokens=limit), environments=environments)
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

    rollouts, _ = sample(
        shape((2,), (0,), max_turns=4, max_turn_tokens=2), environments=[Talkative() for _ in range(3)]
    )
    assert {rollout.num_turns for rollout in rollouts} == {4}
    for rollout in rollouts:
        assert len(turns_of(rollout)) == 4
        assert all(len(turn) == 2 or turn[-1] == END for turn in turns_of(rollout))


def test_an_empty_prompt_is_refused():
    """There would be nothing to predict the first token from."""
    with pytest.raises(ValueError, match=r"expected a prompt of at least one token, got '' \(tree 1\)"):
        sample(shape(), prompts=("lamp wanted", "", "cup"))


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
    rollouts, _ = sample(shape(), environments=[Long() for _ in range(3)])
    assert {rollout.num_turns for rollout in rollouts} == {1}
    assert max(lengths) < 1000


@pytest.mark.parametrize("count", [10_000, 1_000_000])
def test_a_prompt_longer_than_the_model_is_refused(count):
    """By its tokens, or by its characters where they are too many to be encoded."""
    with pytest.raises(ValueError, match=r"expected Ragged.reset to return at most 512 tokens, .* got a text of"):
        sample(shape(), prompts=("lamp", "lamp " * count), max_prompt_tokens=512)


@pytest.mark.parametrize("prompt", [None, 7, b"lamp"])
def test_a_prompt_that_is_no_text_is_refused(prompt):
    """Named with the environment and the tree."""
    with pytest.raises(ValueError, match=r"expected Ragged.reset to return a text, got .* \(tree 1\)"):
        sample(shape(), prompts=("lamp", prompt))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"branching": ()}, "branching factors of at least 1"),
        ({"branching": (4, 0), "fork_turns": (0, 1)}, "branching factors of at least 1"),
        ({"fork_turns": (0, 1)}, r"as many fork turns as branching factors, got \[0, 1\] for \[3, 2, 2\]"),
        ({"fork_turns": (0, 2, 1)}, "ascending fork turns"),
        ({"fork_turns": (0, 0, 1)}, "ascending fork turns"),
        ({"fork_turns": (-1, 0, 1)}, "ascending fork turns"),
        ({"fork_turns": (0, 1, 5)}, r"ascending fork turns in \[0, max_turns = 5\), got \[0, 1, 5\]"),
        ({"max_turn_tokens": 0}, "expected max_turn_tokens of at least 1, got 0"),
        ({"max_completion_tokens": 0}, "expected max_completion_tokens of at least 1, got 0"),
    ],
)
def test_shapes_that_make_no_tree(changes, message):
    """A shape is checked when it is made."""
    with pytest.raises(ValueError, match=message):
        shape(**changes)
