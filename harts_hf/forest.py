"""Trees made of trees: several as one, one with nothing shared, and tokens for a shape (NumPy only)."""

from collections.abc import Sequence

import numpy as np

from harts_hf.tree import IntArray, RolloutTree


def concatenate_trees(trees: Sequence[RolloutTree]) -> RolloutTree:
    """Several trees as one of several roots: the rows, and the trajectories, of the first tree first.

    Prefixes that two trees have in common stay apart; merge the trajectories to share them. Tokens are kept if every
    tree has them.

    Raises:
        ValueError: no tree.
    """
    if not trees:
        raise ValueError("expected at least one tree, got none")
    if len(trees) == 1:
        return trees[0]
    first_rows = np.cumsum([0] + [tree.num_tokens for tree in trees[:-1]]).tolist()
    placed = list(zip(trees, first_rows, strict=True))
    tokens = [tree.token_ids for tree in trees if tree.has_token_ids]
    return RolloutTree(
        parent=np.concatenate([np.where(tree.parent < 0, -1, tree.parent + first) for tree, first in placed]),
        depth=np.concatenate([tree.depth for tree in trees]),
        subtree_end=np.concatenate([tree.subtree_end + first for tree, first in placed]),
        end_rows=np.concatenate([tree.end_rows + first for tree, first in placed]),
        token_ids=np.concatenate(tokens) if len(tokens) == len(trees) else None,
    )


def expand_tree(tree: RolloutTree) -> RolloutTree:
    """The same trajectories, every one on rows of its own (a root each), in the order of their numbers."""
    lengths = tree.trajectory_lengths
    ends = np.cumsum(lengths)
    starts = ends - lengths
    rows = np.arange(int(ends[-1]))
    parent = rows - 1
    parent[starts] = -1
    return RolloutTree(
        parent=parent,
        depth=rows - np.repeat(starts, lengths),
        subtree_end=np.repeat(ends, lengths),
        end_rows=ends - 1,
        token_ids=_expanded_tokens(tree) if tree.has_token_ids else None,
    )


def _expanded_tokens(tree: RolloutTree) -> IntArray:
    return tree.token_ids[np.concatenate(tree.paths())]


def random_tokens(tree: RolloutTree, vocab_size: int, rng: np.random.Generator) -> IntArray:
    """``[N]`` random token ids for a tree without any; siblings begin with different ones.

    Raises:
        ValueError: more siblings than the vocabulary has tokens.
    """
    order = np.argsort(tree.parent, kind="stable")
    above = tree.parent[order]
    first = np.flatnonzero(np.diff(above, prepend=-2))
    sizes = np.diff(first, append=len(order))
    if sizes.max() > vocab_size:
        raise ValueError(f"expected at most {vocab_size} siblings (the vocabulary size), got {sizes.max()}")
    start = rng.integers(0, vocab_size, len(first))
    tokens = np.empty(tree.num_tokens, np.int64)
    tokens[order] = (np.repeat(start, sizes) + np.arange(len(order)) - np.repeat(first, sizes)) % vocab_size
    return tokens
