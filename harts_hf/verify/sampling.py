"""A part of a rollout file that is small enough to be computed in several ways, with its sharing kept."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harts_hf.forest import random_tokens
from harts_hf.tree import IntArray, RolloutTree

# Trajectories that are taken of a group that does not fit whole.
_PART = 8


@dataclass(frozen=True, eq=False, kw_only=True)
class Sample:
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


def sample_trajectories(trees: Sequence[RolloutTree], *, max_tokens: int, vocab_size: int, seed: int = 0) -> Sample:
    """Draws whole groups, in random order but those with branches first, while they fit into ``max_tokens``.

    If no group fits, a part of the group that shares most: neighbours in the tree, each cut to a window around the
    first branch between them (positions then count from the window's start).

    Args:
        trees: a tree a group; without token ids they are filled by :func:`harts_hf.forest.random_tokens`.
        max_tokens: expanded tokens, at least 2.
        vocab_size: of the model.
        seed: of the draws; the same arguments give the same sample.

    Raises:
        ValueError: token ids outside the vocabulary, or no trajectory of at least two tokens.
    """
    rng = np.random.default_rng(seed)
    if max_tokens < 2:
        raise ValueError(f"expected max_tokens of at least 2, got {max_tokens}")
    whole: list[RolloutTree] = []
    left = max_tokens
    order = rng.permutation(len(trees)).tolist()
    for number in sorted(order, key=lambda number: not (trees[number].num_children > 1).any()):
        if trees[number].num_expanded_tokens <= left:
            whole.append(trees[number])
            left -= trees[number].num_expanded_tokens
    chosen = whole or [max(trees, key=lambda tree: tree.sharing_ratio)]
    trajectories: list[IntArray] = []
    for tree in chosen:
        tokens = tree.token_ids if tree.has_token_ids else random_tokens(tree, vocab_size, rng)
        paths = [tree.path(i) for i in range(tree.num_trajectories)] if whole else _part(tree, max_tokens, rng)
        trajectories += [tokens[path] for path in paths if len(path) > 1]
    if not trajectories:
        raise ValueError("expected a trajectory of at least two tokens, got none: there is nothing to predict")
    largest = max(int(tokens.max()) for tokens in trajectories)
    if largest >= vocab_size:
        raise ValueError(f"expected token ids below the vocabulary size {vocab_size}, got {largest}")
    return Sample(
        trajectories=tuple(trajectories),
        num_groups=len(chosen),
        is_cut=not whole,
        is_filled=not chosen[0].has_token_ids,
    )


def _part(tree: RolloutTree, max_tokens: int, rng: np.random.Generator) -> list[IntArray]:
    """Windows of paths of neighbouring trajectories, at most ``max_tokens`` rows together."""
    count = max(1, min(_PART, tree.num_trajectories, max_tokens // 2))
    first = int(rng.integers(tree.num_trajectories - count + 1))
    in_preorder = np.argsort(tree.end_rows, kind="stable")
    paths = [tree.path(int(i)) for i in in_preorder[first : first + count]]
    length = max_tokens // count
    start = 0
    if max(map(len, paths)) > length:
        start = max(0, min(_common_prefix(paths) - length // 2, min(map(len, paths)) - 2))
    return [path[start : start + length] for path in paths]


def _common_prefix(paths: Sequence[IntArray]) -> int:
    size = min(map(len, paths))
    differs = np.any([path[:size] != paths[0][:size] for path in paths], axis=0)
    return int(differs.argmax()) if differs.any() else size
