"""What environments return is held to their contract, by name and turn, before it reaches the training."""

import numpy as np
import pytest
import torch

from harts_hf.rollouts.contract import fork_environment, play_turn, read_reward
from harts_hf.rollouts.environment import Environment, StepResult


class Answers(Environment):
    """Answers everything, its reward and its forks too, with what it was made with."""

    def __init__(self, answer):
        self._answer = answer

    def reset(self, prompt, *, seed):
        return self._answer

    def step(self, action):
        return self._answer

    @property
    def reward(self):
        return self._answer

    def fork(self):
        return self._answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, r"expected Answers.step to return a StepResult, got None \(turn 3\)"),
        (("x", False, {}), r"expected Answers.step to return a StepResult, got \('x', False, {}\)"),
        ("ab", "expected Answers.step to return a StepResult, got 'ab'"),
        (StepResult(None, False), r"to return a text as observation, got None \(turn 3\)"),
        (StepResult(b"x", True), "to return a text as observation, got b'x'"),
        (StepResult("ab\ud800", False), r"to return a text as observation, got the character '\\ud800' at position 2"),
    ],
)
def test_turns_that_are_none(answer, message):
    """Each is named with the environment and the turn."""
    with pytest.raises(ValueError, match=message):
        play_turn(Answers(answer), "look", 3)


def test_turns_that_are():
    """A plain pair will do, and so will NumPy's bool."""
    assert play_turn(Answers(("x", np.bool_(True))), "look", 0) == StepResult("x", True)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -1e300, None, "1.0", b"1", [1.0], 1j, 10**400])
def test_rewards_that_are_none(reward):
    """A number that would become NaN or infinite in the training is as bad as none."""
    with pytest.raises(ValueError, match=r"expected Answers.reward to be a finite number that float32 holds, got "):
        read_reward(Answers(reward))


@pytest.mark.parametrize("reward", [1, True, 1.0, np.float32(1), np.array(1.0), torch.tensor(1.0)])
def test_rewards_that_are(reward):
    """Numbers of any library."""
    assert read_reward(Answers(reward)) == 1.0


def test_forks_that_are_none():
    """Two conversations must not play one episode."""
    environment = Answers(None)
    with pytest.raises(ValueError, match=r"expected Answers.fork to return a copy, got None"):
        fork_environment(environment)
    environment._answer = environment
    with pytest.raises(ValueError, match=r"expected Answers.fork to return a copy, got the environment itself"):
        fork_environment(environment)
