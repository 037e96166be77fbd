"""Advantages along paths equal a loop backwards over each chain's trained tokens, written from the definition."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts_hf.trainers.gae import estimate_advantages


def backward_loop(values, rewards, trained, chain, bootstrap, gamma, lam):
    """The definition, token by token."""
    advantages, returns = np.zeros_like(values), np.zeros_like(values)
    for number in np.unique(chain):
        steps = [(b, c) for b in np.flatnonzero(chain == number) for c in np.flatnonzero(trained[b])]
        running, following = 0.0, None
        for b, c in reversed(steps):
            following = bootstrap[b] if following is None else following
            running = rewards[b, c] + gamma * following - values[b, c] + gamma * lam * running
            advantages[b, c], returns[b, c] = running, running + values[b, c]
            following = values[b, c]
    return advantages, returns


@given(
    counts=st.lists(st.integers(1, 3), min_size=1, max_size=6),
    columns=st.integers(1, 9),
    density=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    gamma=st.sampled_from([1.0, 0.97, 0.0]),
    lam=st.sampled_from([1.0, 0.9, 0.0]),
    seed=st.integers(0, 99),
)
@settings(max_examples=150)
def test_equals_a_backward_loop(counts, columns, density, gamma, lam, seed):
    """Ragged chains of several rows, rows without a trained token, every discount; measured 1e-15."""
    rng = np.random.default_rng(seed)
    chain = np.repeat(rng.permutation(len(counts)), counts)
    shape = (len(chain), columns)
    given = rng.normal(size=shape), rng.normal(size=shape), rng.random(shape) < density, chain
    bootstrap = np.where(rng.random(len(chain)) < 0.5, rng.normal(size=len(chain)), 0)
    found = estimate_advantages(*given, bootstrap, gamma=gamma, lam=lam)
    advantages, returns = backward_loop(*given, bootstrap, gamma, lam)
    np.testing.assert_allclose(found.advantages, advantages, rtol=0, atol=1e-13)
    np.testing.assert_allclose(found.returns, returns, rtol=0, atol=1e-13)


def test_an_environment_between_two_turns():
    """With gamma = lam = 1 an advantage is what was earned from there on minus the value, across turns and samples."""
    values = [[0.5, 9, 9, 0.2], [9, 0.1, 9, 9]]
    rewards = [[1, 7, 7, 2], [7, 4, 7, 7]]
    trained = [[1, 0, 0, 1], [0, 1, 0, 0]]
    found = estimate_advantages(values, rewards, trained, [3, 3], [0, 0], gamma=1, lam=1)
    np.testing.assert_allclose(found.returns, [[7, 0, 0, 6], [0, 4, 0, 0]])
    apart = estimate_advantages(values, rewards, trained, [0, 1], [0.25, 0], gamma=1, lam=1)
    np.testing.assert_allclose(apart.returns, [[3.25, 0, 0, 2.25], [0, 4, 0, 0]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": [[1.0]]}, "one shape"),
        ({"chain": [0]}, "shape \\(3,\\)"),
        ({"chain": [0, 1, 0]}, "rows of a chain together"),
        ({"gamma": 1.1}, "gamma in \\[0, 1\\], got 1.1"),
        ({"rewards": np.full((3, 2), np.nan)}, "finite rewards, got nan"),
    ],
)
def test_refusals(change, message):
    """What does not fit is named."""
    arguments = {
        "values": np.zeros((3, 2)), "rewards": np.zeros((3, 2)), "is_trained": np.ones((3, 2)), "chain": [0, 0, 1],
        "bootstrap": np.zeros(3), "gamma": 1.0, "lam": 0.95, **change,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        estimate_advantages(**arguments)
