"""Minibatches of whole trees."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def deal_trees(num_trees: int, num_minibatches: int, key: Sequence[int]) -> list[NDArray[np.int64]]:
    """Which trees each minibatch of an epoch has: a random order in equal parts, the first ones a tree larger.

    Args:
        num_trees: trees of a generation batch on this process.
        num_minibatches: parts; with fewer trees the last ones are empty.
        key: what the order is drawn from, such as seed, step and process.
    """
    order = np.random.default_rng(list(key)).permutation(num_trees)
    return np.array_split(order, num_minibatches)
