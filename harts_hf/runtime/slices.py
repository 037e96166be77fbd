"""Which slice of an update each trajectory of a window belongs to, and how often a slice passes through a row."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from harts_hf.planner import Microbatch
from harts_hf.runtime.ranks import Ranks
from harts_hf.tree import IntArray, RolloutTree


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
