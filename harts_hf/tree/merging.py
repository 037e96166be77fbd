"""Trajectories merged into their prefix trie: sorted, then each appends what it does not share with the one before."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from harts_hf.tree.arrays import IntArray, TreeArrays, as_token_array


def merge(trajectories: Iterable[ArrayLike]) -> TreeArrays:
    """See :meth:`harts_hf.RolloutTree.from_trajectories`."""
    checked = [as_token_array(trajectory, index) for index, trajectory in enumerate(trajectories)]
    if not checked:
        raise ValueError("expected at least one trajectory, got none")
    # Big-endian bytes of non-negative ints compare as the ints do, and bytes compare with memcmp.
    width = 8 if any(largest > 0x7FFFFFFF for _, largest in checked) else 4
    keys = [array.astype(f">i{width}").tobytes() for array, _ in checked]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    words = [np.frombuffer(keys[i], f"u{width}") for i in order]  # half of what there is to read, to tell apart
    shared = [0] + [_common_prefix(a, b) for a, b in pairwise(words)]
    return _of_sorted([checked[i][0] for i in order], shared, np.asarray(order, np.int64))


def _of_sorted(arrays: list[IntArray], shared: list[int], order: IntArray) -> TreeArrays:
    lengths = np.fromiter(map(len, arrays), np.int64, len(arrays))
    shared_lengths = np.asarray(shared, np.int64)
    starts = np.zeros(len(arrays) + 1, np.int64)
    np.cumsum(lengths - shared_lengths, out=starts[1:])
    num_rows = int(starts[-1])
    token_ids = np.concatenate([array[skip:] for array, skip in zip(arrays, shared, strict=True)])
    depth = np.arange(num_rows) - np.repeat(starts[:-1] - shared_lengths, np.diff(starts))

    parent = np.arange(-1, num_rows - 1)
    subtree_end = np.full(num_rows, num_rows, np.int64)
    end_rows = np.empty(len(arrays), np.int64)
    # The path of the current trajectory as runs of rows: [first depth, first row, number of rows still open].
    path: list[list[int]] = []
    for index, (keep, start, length) in enumerate(zip(shared, starts[:-1].tolist(), lengths.tolist(), strict=True)):
        while path and path[-1][0] >= keep and keep < length:
            _, row, count = path.pop()
            subtree_end[row : row + count] = start
        if keep < length:
            if path:
                first_depth, row, count = path[-1]
                open_rows = keep - first_depth
                subtree_end[row + open_rows : row + count] = start
                path[-1][2] = open_rows
                parent[start] = row + open_rows - 1
            else:
                parent[start] = -1
            path.append([keep, start, length - keep])
        first_depth, row, _ = path[-1]
        end_rows[order[index]] = row + length - 1 - first_depth
    return TreeArrays(parent=parent, depth=depth, subtree_end=subtree_end, end_rows=end_rows, token_ids=token_ids)


# Neighbours mostly differ late or early: a block of tokens at a time stops at the first difference.
_BLOCK = 8192


def _common_prefix(first: NDArray[Any], second: NDArray[Any]) -> int:
    size = min(len(first), len(second))
    for start in range(0, size, _BLOCK):
        differ = first[start : min(start + _BLOCK, size)] != second[start : min(start + _BLOCK, size)]
        position = int(differ.argmax())
        if differ[position]:
            return start + position
    return size
