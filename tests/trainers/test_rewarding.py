"""A reward function that fails says so after TRL's collective, not before it."""

import asyncio

import pytest
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
        (lambda **given: [1.0], "expected 2 rewards, one per completion, got 1"),
        (lambda **given: ["good", "bad"], "numbers or None, got 'good'"),
        (lambda **given: None, "expected 2 rewards, one per completion, got None"),
    ],
    ids=["raises", "too few", "text", "none"],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_errors_are_kept(function, message, is_async):
    """Zeros go on to the collective."""

    async def later(**given):
        return function(**given)

    errors = []
    (guard,) = guarded([later if is_async else function], errors)
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
