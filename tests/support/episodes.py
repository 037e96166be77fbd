"""Episodes of any number of samples, as agents leave them: what they hold, and rollout functions that hand them out.

Groups take the kinds below in turn, each from another one on.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch

from support.models import VOCAB

EOS = 1


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One request and its answer: token ids, log-probs and the mask of the answer (1: the policy's own)."""

    prompt_ids: list[int]
    completion_ids: list[int]
    env_mask: list[int]
    logprobs: list[float]


@dataclass(frozen=True, kw_only=True)
class Episode:
    """What one agent did on a prompt, in order, and what a reward function says of it."""

    samples: list[Sample]
    reward: float
    is_absent: bool = False  # stands for no rollout


class Draw:
    """Random pieces for one episode; the prompt and the first turn are those of its whole group.

    Args:
        rng: draws the pieces.
        prompt: token ids.
        turn: token ids of a first answer, without an end.
    """

    def __init__(self, rng: np.random.Generator, prompt: list[int], turn: list[int]) -> None:
        self.rng, self.prompt, self.turn = rng, prompt, turn

    def tokens(self, low: int = 1, high: int = 7) -> list[int]:
        """Between ``low`` and ``high`` tokens, none of them special."""
        return self.rng.integers(3, VOCAB, self.rng.integers(low, high)).tolist()

    def sample(self, prompt: list[int], *pieces: list[int], env: Sequence[int] = ()) -> Sample:
        """A sample whose completion consists of ``pieces``; those numbered in ``env`` came from outside."""
        completion = [token for piece in pieces for token in piece]
        mask = [int(number not in env) for number, piece in enumerate(pieces) for _ in piece]
        logprobs = self.rng.normal(-3.5, 0.3, len(completion)).tolist()
        return Sample(prompt_ids=list(prompt), completion_ids=completion, env_mask=mask, logprobs=logprobs)


def one(draw: Draw) -> list[Sample]:
    """A linear conversation in one row, with two observations."""
    pieces = [draw.turn, draw.tokens(), draw.tokens(), draw.tokens(), [*draw.tokens(), EOS]]
    return [draw.sample(draw.prompt, *pieces, env=(1, 3))]


def nested(draw: Draw) -> list[Sample]:
    """A sample for each turn: the prompt of each holds the answer before it, and what came back."""
    history, samples = draw.prompt, []
    for answer in (draw.turn, draw.tokens(), [*draw.tokens(), EOS]):
        samples.append(draw.sample(history, answer))
        history = history + answer + draw.tokens()
    return samples


def recurring(draw: Draw) -> list[Sample]:
    """One prompt; sampled tokens recur with mask 1, after forks, in whole and in part, and once after mask 0."""
    seen, reply, half = draw.tokens(2), draw.tokens(2), draw.turn[: max(1, len(draw.turn) // 2)]
    return [
        draw.sample(draw.prompt, draw.turn, seen, env=(1,)),
        draw.sample(draw.prompt, draw.turn, seen, reply),  # what came from outside is the policy's own here
        draw.sample(draw.prompt, half, [*draw.tokens(2), EOS]),
        draw.sample(draw.prompt, draw.turn, seen, reply, [*draw.tokens(), EOS], env=(1,)),
    ]


def retemplated(draw: Draw) -> list[Sample]:
    """The template drops earlier thinking: the same answer after another history is sampled anew."""
    thought, answer = draw.tokens(2), draw.tokens(3)
    return [
        draw.sample(draw.prompt, thought, answer),
        draw.sample(draw.prompt, answer, draw.tokens(), draw.tokens(2), env=(1,)),
        draw.sample(draw.prompt + answer + draw.tokens(), [*draw.tokens(2), EOS]),
    ]


def duplicates(draw: Draw) -> list[Sample]:
    """A row, the same row, its beginning (truncated), and a row that goes on from it and is truncated too."""
    answer = draw.tokens(4, 9)
    whole = draw.sample(draw.prompt, draw.turn, draw.tokens(), [*answer, EOS], env=(1,))
    inside = Sample(
        prompt_ids=whole.prompt_ids,
        completion_ids=whole.completion_ids[:-2],
        env_mask=whole.env_mask[:-2],
        logprobs=whole.logprobs[:-2],
    )
    return [whole, whole, inside, draw.sample(draw.prompt, inside.completion_ids, draw.tokens(2))]


def empty(draw: Draw) -> list[Sample]:
    """The agent never asked."""
    return []


def resplit(draw: Draw) -> list[Sample]:
    """The same tokens, cut elsewhere into prompt and completion: a token recurs whose history is equal."""
    seen, reply = draw.tokens(), draw.tokens(2)
    return [
        draw.sample(draw.prompt, draw.turn, seen, reply, env=(1,)),
        draw.sample(draw.prompt + draw.turn + seen, reply, [*draw.tokens(2), EOS]),
    ]


def compacted(draw: Draw) -> list[Sample]:
    """Turns as samples of their own; then the context is replaced by a summary, and all begins anew."""
    summary = draw.prompt[:1] + draw.tokens(3)
    more = draw.tokens(2)
    return [
        draw.sample(draw.prompt, draw.turn),
        draw.sample(draw.prompt + draw.turn + draw.tokens(), draw.tokens(2)),
        draw.sample(summary, more),
        draw.sample(summary, more, draw.tokens(), draw.tokens(2), env=(1,)),
        draw.sample(summary + more + draw.tokens(), [*draw.tokens(2), EOS]),
    ]


KINDS: list[Callable[[Draw], list[Sample]]] = [
    one,
    empty,
    nested,
    recurring,
    retemplated,
    duplicates,
    resplit,
    compacted,
]


def episodes_of(prompt: str, count: int, seed: int = 0) -> list[Episode]:
    """``count`` episodes on prompt ``p0``, ``p1``, ...; deterministic."""
    number = int(prompt[1:])
    rng = np.random.default_rng([seed, number])
    group = Draw(rng, rng.integers(3, VOCAB, rng.integers(2, 10)).tolist(), rng.integers(3, VOCAB, 4).tolist())
    kinds = [KINDS[(3 * number + index) % len(KINDS)] for index in range(count)]
    return [Episode(samples=kind(group), reward=float(rng.normal())) for kind in kinds]


def first_samples(prompt: str, count: int, seed: int = 0) -> list[Episode]:
    """The same episodes cut to their first sample; nobody asked for an episode without: it has one of its own."""
    cut = []
    for episode in episodes_of(prompt, count, seed):
        own = Sample(prompt_ids=[5, 6], completion_ids=[7, 8, EOS], env_mask=[1, 1, 1], logprobs=[-3.0] * 3)
        cut.append(Episode(samples=episode.samples[:1] or [own], reward=episode.reward))
    return cut


def as_output(episodes: list[Episode]) -> dict[str, list[Any]]:
    """A rollout function's output: one entry a sample, but for the reward, which is one a episode."""
    rows = [(number, sample) for number, episode in enumerate(episodes) for sample in episode.samples]
    return {
        "episode": [number for number, _ in rows],
        "prompt_ids": [list(sample.prompt_ids) for _, sample in rows],
        "completion_ids": [list(sample.completion_ids) for _, sample in rows],
        "logprobs": [list(sample.logprobs) for _, sample in rows],
        "env_mask": [list(sample.env_mask) for _, sample in rows],
        "recorded_reward": [episode.reward for episode in episodes],
    }


@dataclass
class Generation:
    """What one call handed out, and how TRL shuffled it.

    Attributes:
        episodes: in the order of the prompts.
        global_step: optimizer steps before it.
        permutation: the episode at each place after shuffling; None in evaluation.
    """

    episodes: list[Episode]
    global_step: int
    permutation: list[int] | None = None


@dataclass
class RaggedRollouts:
    """A rollout function that plays episodes back and keeps what an oracle needs to follow the training.

    Attributes:
        source: gives the episodes of a prompt.
        with_key: whether rows are marked with their episode; without, each has to have one sample.
        change: may alter the output.
        training: generations so far.
        evaluation: likewise.
    """

    source: Callable[[str, int], list[Episode]] = episodes_of
    with_key: bool = True
    change: Callable[[dict[str, Any]], Any] | None = None
    training: list[Generation] = field(default_factory=list)
    evaluation: list[Generation] = field(default_factory=list)

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """TRL's contract: prompts come repeated."""
        is_training = trainer.model.training
        group = trainer.num_generations if is_training else trainer.num_generations_eval
        episodes = [episode for prompt in prompts[::group] for episode in self.source(prompt, group)]
        into = self.training if is_training else self.evaluation
        into.append(Generation(episodes=episodes, global_step=trainer.state.global_step))
        output: dict[str, Any] = as_output(episodes)
        if not self.with_key:
            del output["episode"]
        if self.change is not None:
            self.change(output)
        return output

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Notes how generations are shuffled: by one draw of as many numbers as there are episodes."""
        stock = torch.randperm

        def randperm(count: int, **options: Any) -> torch.Tensor:
            drawn = stock(count, **options)
            if not options and self.training and self.training[-1].permutation is None:
                assert count == len(self.training[-1].episodes), "shuffled something else than episodes"
                self.training[-1].permutation = drawn.tolist()
            return drawn

        with mock.patch.object(torch, "randperm", randperm):
            yield
