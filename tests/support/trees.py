"""Trajectories for tests: hand-made corner cases, random trees, and the shapes of real ones cut to size."""

import numpy as np
from shared_data import shape_trees

from harts_hf import RolloutTree
from harts_hf.forest import random_tokens

BRANCH_DEPTHS = (1, 2, 3, 63, 64, 65, 127)


def branching(depth: int, *, vocab: int, seed: int = 0) -> list[np.ndarray]:
    """A branch at ``depth``: three ragged children, an interior end, a duplicate, another root."""
    rng = np.random.default_rng(seed)
    trunk = rng.integers(2, vocab, depth)
    tails = [np.concatenate([[first], rng.integers(2, vocab, size)]) for first, size in ((2, 70), (3, 5), (4, 0))]
    rows = [np.concatenate([trunk, tail]) for tail in tails]
    rows.append(rows[0][: depth + 30])  # ends inside another
    rows.append(rows[1].copy())  # an exact duplicate
    rows.append(np.concatenate([[(trunk[0] + 1 - 2) % (vocab - 2) + 2], rng.integers(2, vocab, 9)]))  # another root
    return rows


def random_trajectories(seed: int, *, vocab: int, count: int = 7, max_piece: int = 50) -> list[np.ndarray]:
    """Trajectories that fork from one another at random depths."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(2, vocab, rng.integers(2, 2 * max_piece))]
    while len(rows) < count:
        base = rows[rng.integers(len(rows))]
        keep = int(rng.integers(1, len(base) + 1))
        rows.append(np.concatenate([base[:keep], rng.integers(2, vocab, rng.integers(1, max_piece))]))
    return rows


def real_trajectories(name: str, *, group: int, vocab: int, max_tokens: int, seed: int = 0) -> list[np.ndarray]:
    """Trajectories of a real group's shape with random tokens: the ``max_tokens`` positions with most branches.

    Real prompts are long: the first ``max_tokens`` positions would be one path, many times.
    """
    tree = shape_trees(name)[group]
    tokens = random_tokens(tree, vocab - 2, np.random.default_rng(seed)) + 2
    branches = np.sort(tree.depth[tree.num_children > 1])
    starts = np.maximum(branches - 20, 0)
    inside = np.searchsorted(branches, starts + max_tokens - 20) - np.searchsorted(branches, starts)
    start = int(starts[inside.argmax()])
    rows = [tokens[tree.path(i)][start : start + max_tokens] for i in range(tree.num_trajectories)]
    rows = [row for row in rows if len(row) > 1]
    assert (RolloutTree.from_trajectories(rows).num_children > 1).any()
    return rows
