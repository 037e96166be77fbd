"""A reward function that fails says so after TRL's collective, not before it."""

import asyncio

import numpy as np
import pytest
import torch
from torch import nn
from trl.trainer.utils import is_async_callable

from harts_hf.trainers.rewarding import guarded

CALL = {"prompts": ["a", "b"], "completions": ["c", "d"]}


def fine(prompts, completions, **extra):
    """A reward, and none."""
    return (1.0 if prompt == "a" else None for prompt in prompts)


class Instance:
    """Has no name."""

    def __call__(self, **given):
        """Rewards nothing."""
        return [0.5] * len(given["prompts"])


def test_rewards_pass():
    """As they are, of whatever is callable; models are not wrapped."""
    errors, model = [], nn.Linear(1, 1)
    functions = guarded([fine, Instance(), model], errors)
    assert functions[0](**CALL) == [1.0, None] and functions[0].__name__ == "fine"
    assert functions[1](**CALL) == [0.5, 0.5] and functions[2] is model and not errors


def breaks(**given):
    """Raises."""
    raise LookupError("no such test")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (breaks, "no such test"),
        (lambda **given: [1.0], "expected 2 rewards from the reward function odd, one number or None per"),
        (lambda **given: [1.0], "got 1"),
        (lambda **given: ["good", "bad"], "got 'good'"),
        (lambda **given: None, "got None"),
        (lambda **given: torch.tensor(1.0), "(Tensor of shape [])"),
        (lambda **given: np.array(1.0), "(ndarray of shape [])"),
        (lambda **given: [[1.0], [0.0]], "got [1.0] for a completion"),
        (lambda **given: torch.ones(2, 3), "(Tensor of shape [3])"),
        (lambda **given: "ab", "got 'ab'"),
        (lambda **given: {"a": 1.0, "b": 2.0}, "got {'a': 1.0, 'b': 2.0}"),
    ],
    ids=["raises", "named", "too few", "texts", "none", "0-d", "NumPy", "lists", "2-d", "text", "mapping"],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_errors_are_kept(function, message, is_async):
    """Zeros go on to the collective."""

    async def later(**given):
        return function(**given)

    errors, wanted = [], later if is_async else function
    wanted.__name__ = "odd"
    (guard,) = guarded([wanted], errors)
    assert is_async_callable(guard) == is_async
    found = asyncio.run(guard(**CALL)) if is_async else guard(**CALL)
    assert found == [0.0, 0.0] and len(errors) == 1 and message in str(errors[0])


def test_calls_of_ones_own():
    """Without prompts nobody knows how many rewards were wanted."""
    errors = []
    (guard,) = guarded([breaks], errors)
    with pytest.raises(LookupError, match="no such test"):
        guard(completions=["c"])
    assert not errors
