"""The slices of an update: their rows, and which of them each trajectory of a window belongs to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from harts_hf.planner import Microbatch
from harts_hf.runtime.ranks import Ranks
from harts_hf.tree import IntArray, RolloutTree

Index = Mapping[str, NDArray[np.int64]]


class SliceRows(Protocol):
    """The trajectories of a slice, and where its values lie on them."""

    def trajectories(self) -> list[IntArray]:
        """Those that have something to score; may be none."""

    def stand_in(self) -> IntArray:
        """One that is run if no slice of an update has any, so that every parameter still gets its zero gradient."""

    def index(self, paths: Sequence[IntArray]) -> Index:
        """For each name of a value per row, in any shape, the row of the tree; -1 where nothing is asked for.

        Args:
            paths: rows of the tree of each of :meth:`trajectories`, ``[L]``.
        """


@dataclass(frozen=True, eq=False, kw_only=True)
class SliceTable:
    """The slices that a window's trajectories belong to.

    Slice ``i`` of rank ``r`` is number ``r * (slices per rank) + i``, on every rank.

    Attributes:
        slice_of: ``[trajectories of the window]`` number of the slice; -1 for a trajectory of none.
        count: K, slices of all ranks.
    """

    slice_of: IntArray
    count: int

    @classmethod
    def of(cls, sizes: Sequence[int], ranks: Ranks, *, is_global: bool, num_trajectories: int) -> "SliceTable":
        """The table of an update's window; a collective where there are several ranks.

        Args:
            sizes: trajectories of each slice of this rank.
            ranks: of the training; each has as many slices.
            is_global: whether the window holds the trajectories of all ranks, by rank, or this rank's own.
            num_trajectories: of the window; a stand-in for none belongs to no slice.
        """
        per_rank = [found[0] for found in ranks.gather_arrays([np.array(sizes, np.int64)])]
        first = 0 if is_global else ranks.index * len(sizes)
        held = np.concatenate(per_rank) if is_global else per_rank[ranks.index]
        slice_of = np.repeat(first + np.arange(len(held)), held)
        if not len(slice_of):
            slice_of = np.full(num_trajectories, -1)
        return cls(slice_of=slice_of, count=ranks.count * len(sizes))

    def counts(self, tree: RolloutTree, microbatch: Microbatch) -> torch.Tensor:
        """``[K, N]`` float64, trajectories of each slice through each row that a microbatch owns; 0 in the others."""
        rows, counts = microbatch.rows, np.zeros((self.count, microbatch.num_rows))
        for number in np.unique(self.slice_of[self.slice_of >= 0]):
            # A trajectory passes through a row if it ends in the row's subtree.
            ends = np.sort(tree.end_rows[self.slice_of == number])
            counts[number] = np.searchsorted(ends, tree.subtree_end[rows]) - np.searchsorted(ends, rows)
        return torch.from_numpy(counts * microbatch.owned)


def checked(trajectories: list[IntArray]) -> list[IntArray]:
    """Those of a slice, before other ranks see them.

    Raises:
        ValueError: one that is no 1-D integer array.
    """
    for tokens in trajectories:
        array = np.asarray(tokens)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(f"expected trajectories as 1-D integer arrays, got {array.dtype} of shape {array.shape}")
    return trajectories
