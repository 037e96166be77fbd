"""A planned window: the tree of an update, its schedule, and its microbatches as tensors."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import ArrayLike

from harts_hf.batch import TreeBatch
from harts_hf.planner import PlannerConfig, Schedule, plan_window
from harts_hf.tree import RolloutTree


class TreeWindow:
    """Everything that one optimizer step computes on trajectories.

    Args:
        trajectories: 1-D integer arrays of token ids; at least one, none empty.
        planner: limits; the defaults if None.
        vocab_size: if given, token ids are checked against it.

    Attributes:
        tree: the prefix tree of the trajectories.
        schedule: the plan.

    Raises:
        ValueError: no trajectory, an empty one, or token ids outside the vocabulary.
    """

    def __init__(
        self, trajectories: Sequence[ArrayLike], planner: PlannerConfig | None = None, *, vocab_size: int | None = None
    ) -> None:
        self.tree = RolloutTree.from_trajectories(trajectories)
        if vocab_size is not None and self.tree.token_ids.max() >= vocab_size:
            token = int(self.tree.token_ids.max())
            index = next(i for i in range(len(trajectories)) if token in self.tree.token_ids[self.tree.path(i)])
            raise ValueError(
                f"expected token ids below the vocabulary size {vocab_size}, got {token} in trajectory {index}"
            )
        self.schedule: Schedule = plan_window(self.tree, planner or PlannerConfig(handoff=False))

    @cached_property
    def batches(self) -> list[TreeBatch]:
        """The microbatches as tensors, in the order of ``schedule.microbatches``."""
        return [TreeBatch(self.tree, microbatch) for microbatch in self.schedule.microbatches]

    def to(self, device: torch.device | str) -> "TreeWindow":
        """Moves the microbatches to ``device``, in place."""
        for batch in self.batches:
            batch.to(device)
        return self

    def label_rows(self, index: int) -> np.ndarray:
        """Rows of the tree whose log-probs are those of trajectory ``index``, ``[L - 1]``."""
        return self.tree.path(index)[1:]
