"""The arrays of a tree, and what merging and laying out both ask of tokens."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
_LARGEST_ID = 2**63 - 1


class TreeArrays(NamedTuple):
    """What a :class:`~harts_hf.RolloutTree` is made of; its attributes say more.

    Attributes:
        parent: ``[N]`` int64, -1 at a root.
        depth: ``[N]`` int64.
        subtree_end: ``[N]`` int64.
        end_rows: ``[num_trajectories]`` int64.
        token_ids: ``[N]`` int64; None of a shape.
    """

    parent: IntArray
    depth: IntArray
    subtree_end: IntArray
    end_rows: IntArray
    token_ids: IntArray | None


def count_occurrences(subtree_end: IntArray, end_rows: IntArray) -> IntArray:
    """``[N]`` int64, how many trajectories pass through each row: those that end in its subtree."""
    ends_before = np.zeros(len(subtree_end) + 1, np.int64)
    np.cumsum(np.bincount(end_rows, minlength=len(subtree_end)), out=ends_before[1:])
    return ends_before[subtree_end] - ends_before[:-1]


def as_token_array(tokens: Any, index: int | None) -> tuple[IntArray, int]:
    """Token ids as int64 (a copy where they are a tree's own, ``index`` None), and the largest of them."""
    name = "token_ids" if index is None else f"trajectory {index}"
    array = np.asarray(tokens)
    if array.ndim != 1:
        raise ValueError(f"expected {name} to be 1-D, got shape {array.shape}")
    if array.size == 0:
        raise ValueError(f"expected {name} to have at least one token, got an empty one")
    if array.dtype.kind not in "iu":
        raise ValueError(f"expected {name} to hold integers, got dtype {array.dtype}")
    wide: IntArray = array.astype(np.int64, copy=index is None)
    largest = int(wide.view(np.uint64).max())  # negative ones are the largest as unsigned: one look, not two
    if largest > _LARGEST_ID:
        if array.dtype.kind == "u":
            raise ValueError(f"expected token ids below 2**63, got {array.max()} in {name}")
        raise ValueError(f"expected token ids of at least 0, got {array.min()} in {name}")
    return wide, largest


def check_siblings_differ(parent: IntArray, token_ids: IntArray) -> None:
    """Raises ValueError if two rows below one, or two roots, have the same token."""
    order = np.lexsort((token_ids, parent))
    same = (parent[order][1:] == parent[order][:-1]) & (token_ids[order][1:] == token_ids[order][:-1])
    if same.any():
        row = int(order[1:][same][0])
        raise ValueError(
            f"expected siblings to begin with different tokens, got token {token_ids[row]} twice "
            f"below row {parent[row]}"
        )
