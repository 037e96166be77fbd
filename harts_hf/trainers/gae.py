"""Generalised advantage estimation along the paths of rollout trees.

A time step is a trained token: its state is what its predictor row has seen, its action the token. The next state is
that of the next trained token, so what an environment wrote between two turns of the policy belongs to the transition.
A token that several trajectories share has one value, and on each of them an advantage and a return of its own: a fork
needs no bootstrap, since every path goes on.

Source: Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation" (arXiv
1506.02438), equations 11 to 16.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False, kw_only=True)
class Estimates:
    """``[B, C]`` float64 each, 0 where nothing is trained.

    Attributes:
        advantages: ``A_j = sum_k (gamma lambda)^k delta_{j+k}``.
        returns: ``A_j + V(s_j)``, what values are trained towards.
    """

    advantages: Floats
    returns: Floats


def estimate_advantages(
    values: ArrayLike,
    rewards: ArrayLike,
    is_trained: ArrayLike,
    chain: ArrayLike,
    bootstrap: ArrayLike,
    *,
    gamma: float,
    lam: float,
) -> Estimates:
    """``delta_j = r_j + gamma V(s_{j+1}) - V(s_j)`` and their discounted sums, chain by chain.

    Args:
        values: ``[B, C]``, of the state before each token (its predictor row).
        rewards: ``[B, C]``, what each trained token earned; others are not read.
        is_trained: ``[B, C]``, 1 at the policy's tokens.
        chain: ``[B]``, rows that follow one another as one episode have equal numbers, and stand together in order.
        bootstrap: ``[B]``, ``V(s_{j+1})`` after the last trained token of a chain, read of its last row that has
            any: 0 where the episode ended by itself, the value of the leaf where it was cut.
        gamma: discount per trained token, in [0, 1].
        lam: lambda, in [0, 1].

    Raises:
        ValueError: shapes that do not fit, numbers outside [0, 1] or that are not finite, rows of a chain apart.
    """
    v, r, chains = np.asarray(values, np.float64), np.asarray(rewards, np.float64), np.asarray(chain)
    trained, end = np.asarray(is_trained) != 0, np.asarray(bootstrap, np.float64)
    _check(v, r, trained, chains, end, gamma, lam)
    rows, columns = np.nonzero(trained)  # in order
    advantages, returns = np.zeros_like(v), np.zeros_like(v)
    if not len(rows):
        return Estimates(advantages=advantages, returns=returns)
    value, of_chain = v[rows, columns], chains[rows]
    first = np.flatnonzero(np.concatenate([[True], of_chain[1:] != of_chain[:-1]]))
    lengths = np.diff(np.append(first, len(rows)))
    following = np.append(value[1:], 0.0)
    last = first + lengths - 1
    following[last] = end[rows[last]]
    delta = r[rows, columns] + gamma * following - value
    # One column of all chains at a time, from the end: chains are long, and there are many.
    place = np.arange(len(rows)) - np.repeat(first, lengths)
    padded = np.zeros((lengths.max(), len(first)))
    padded[place, np.repeat(np.arange(len(first)), lengths)] = delta
    for step in range(len(padded) - 2, -1, -1):
        padded[step] += gamma * lam * padded[step + 1]
    found = padded[place, np.repeat(np.arange(len(first)), lengths)]
    advantages[rows, columns], returns[rows, columns] = found, found + value
    return Estimates(advantages=advantages, returns=returns)


def _check(
    values: Floats,
    rewards: Floats,
    trained: NDArray[np.bool_],
    chain: NDArray[np.int64],
    bootstrap: Floats,
    gamma: float,
    lam: float,
) -> None:
    if values.ndim != 2 or rewards.shape != values.shape or trained.shape != values.shape:
        raise ValueError(
            f"expected values, rewards and is_trained of one shape [B, C], got {values.shape}, {rewards.shape} and "
            f"{trained.shape}"
        )
    if chain.shape != values.shape[:1] or bootstrap.shape != values.shape[:1]:
        raise ValueError(
            f"expected chain and bootstrap of shape {values.shape[:1]}, got {chain.shape} and {bootstrap.shape}"
        )
    for name, number in (("gamma", gamma), ("lam", lam)):
        if not 0 <= number <= 1:
            raise ValueError(f"expected {name} in [0, 1], got {number}")
    for name, array in (("values", values[trained]), ("rewards", rewards[trained]), ("bootstrap", bootstrap)):
        if not np.isfinite(array).all():
            raise ValueError(f"expected finite {name}, got {array[~np.isfinite(array)][0]}")
    changes = np.flatnonzero(chain[1:] != chain[:-1])
    if len(np.unique(chain)) != len(changes) + bool(len(chain)):
        raise ValueError(f"expected rows of a chain together, got {chain.tolist()}")
