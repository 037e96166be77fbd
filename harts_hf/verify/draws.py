"""Draws: parts of a rollout file that are small enough to be computed in several ways, with their sharing kept."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harts_hf.forest import random_tokens
from harts_hf.tree import IntArray, RolloutTree

# Trajectories that are taken of a group that does not fit whole.
_PART = 8


@dataclass(frozen=True, eq=False, kw_only=True)
class Draw:
    """Trajectories drawn from groups.

    Attributes:
        trajectories: each ``[L]`` int64 token ids, at least two.
        num_groups: groups that they come from.
        is_cut: whether trajectories were shortened to fit.
        is_filled: whether token ids were drawn at random, since the file has shapes only.
    """

    trajectories: tuple[IntArray, ...]
    num_groups: int
    is_cut: bool
    is_filled: bool


def draw_trajectories(trees: Sequence[RolloutTree], *, max_tokens: int, vocab_size: int, seed: int = 0) -> Draw:
    """Draws whole groups, in random order but those with branches first, while they fit into ``max_tokens``.

    If no group fits, a part of the group that shares most: neighbours in the tree, each cut to a window around the
    first branch between them (positions then count from the window's start). Trajectories of one token predict
    nothing and are left out.

    Args:
        trees: one per group; without token ids they are filled by :func:`harts_hf.forest.random_tokens`.
        max_tokens: expanded tokens, at least 2.
        vocab_size: of the model.
        seed: of the draw; the same arguments give the same one.

    Raises:
        ValueError: token ids outside the vocabulary, or no trajectory of at least two tokens.
    """
    rng = np.random.default_rng(seed)
    if max_tokens < 2:
        raise ValueError(f"expected max_tokens of at least 2, got {max_tokens}")
    trees = [tree for tree in trees if tree.depth.any()]  # else no trajectory has a second token
    if not trees:
        raise ValueError("expected a trajectory of at least two tokens, got none: there is nothing to predict")
    whole: list[RolloutTree] = []
    left = max_tokens
    order = rng.permutation(len(trees)).tolist()
    for index in sorted(order, key=lambda index: not (trees[index].num_children > 1).any()):
        if trees[index].num_expanded_tokens <= left:
            whole.append(trees[index])
            left -= trees[index].num_expanded_tokens
    chosen = whole or [max(trees, key=lambda tree: tree.sharing_ratio)]
    trajectories: list[IntArray] = []
    for tree in chosen:
        tokens = tree.token_ids if tree.has_token_ids else random_tokens(tree, vocab_size, rng)
        paths = _paths(tree) if whole else _part(tree, max_tokens, rng)
        trajectories += [tokens[path] for path in paths]
    largest = max(int(tokens.max()) for tokens in trajectories)
    if largest >= vocab_size:
        raise ValueError(f"expected token ids below the vocabulary size {vocab_size}, got {largest}")
    return Draw(
        trajectories=tuple(trajectories),
        num_groups=len(chosen),
        is_cut=not whole,
        is_filled=not chosen[0].has_token_ids,
    )


def _paths(tree: RolloutTree) -> list[IntArray]:
    """Rows of the trajectories that predict something, in the file's order."""
    return [tree.path(i) for i in range(tree.num_trajectories) if tree.depth[tree.end_rows[i]] > 0]


def _part(tree: RolloutTree, max_tokens: int, rng: np.random.Generator) -> list[IntArray]:
    """Windows of paths of neighbouring trajectories, at most ``max_tokens`` rows together."""
    paths = sorted(_paths(tree), key=lambda path: int(path[-1]))  # in preorder
    count = max(1, min(_PART, len(paths), max_tokens // 2))
    first = int(rng.integers(len(paths) - count + 1))
    paths = paths[first : first + count]
    length = max_tokens // count
    start = 0
    if max(map(len, paths)) > length:
        start = max(0, min(_common_prefix(paths) - length // 2, min(map(len, paths)) - 2))
    return [path[start : start + length] for path in paths]


def _common_prefix(paths: Sequence[IntArray]) -> int:
    size = min(map(len, paths))
    differs = np.any([path[:size] != paths[0][:size] for path in paths], axis=0)
    return int(differs.argmax()) if differs.any() else size
