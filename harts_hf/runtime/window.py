"""A planned window: the tree of an update, its schedule, and its microbatches as tensors."""

import copy
import warnings
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import ArrayLike

from harts_hf.batch import TreeBatch, build_batches
from harts_hf.errors import HartsWarning
from harts_hf.planner import Microbatch, PlannerConfig, Schedule, plan_window
from harts_hf.planner.execution import DUMMY
from harts_hf.tree import RolloutTree


class TreeWindow:
    """Everything that one optimizer step computes on trajectories.

    Args:
        trajectories: 1-D integer arrays of token ids; at least one, none empty.
        planner: limits; the defaults if None.
        vocab_size: if given, token ids are checked against it.

    Attributes:
        rollout_tree: the prefix tree of the trajectories.
        schedule: the plan.
        tree: the tree that the plan's rows refer to: ``rollout_tree``, or, where the plan shares nothing, every
            trajectory on rows of its own.

    Raises:
        ValueError: no trajectory, an empty one, token ids outside the vocabulary, or a plan for several ranks.
    """

    def __init__(
        self, trajectories: Sequence[ArrayLike], planner: PlannerConfig | None = None, *, vocab_size: int | None = None
    ) -> None:
        tree = RolloutTree.from_trajectories(trajectories)
        if vocab_size is not None and tree.token_ids.max() >= vocab_size:
            token = int(tree.token_ids.max())
            index = next(i for i in range(tree.num_trajectories) if token in tree.token_ids[tree.path(i)])
            raise ValueError(
                f"expected token ids below the vocabulary size {vocab_size}, got {token} in trajectory {index}"
            )
        self.rollout_tree = tree
        planner = planner or PlannerConfig()
        _check_world_size(planner)
        self.schedule: Schedule = plan_window(tree, planner)
        self.tree = self.schedule.tree
        self._warn_oversized()

    @classmethod
    def from_schedule(cls, trajectories: Sequence[ArrayLike], schedule: Schedule) -> "TreeWindow":
        """A window with a schedule of one's own.

        Raises:
            ValueError: a schedule for another tree, or for several ranks.
        """
        _check_world_size(schedule.config)
        window = cls.__new__(cls)
        window.rollout_tree = RolloutTree.from_trajectories(trajectories)
        window.schedule, window.tree = schedule, schedule.tree
        theirs = [schedule.tree.token_ids[schedule.tree.path(i)] for i in range(schedule.tree.num_trajectories)]
        if len(theirs) != len(trajectories):
            raise ValueError(f"expected a schedule for {len(trajectories)} trajectories, got one for {len(theirs)}")
        for index, (tokens, planned) in enumerate(zip(trajectories, theirs, strict=True)):
            if not np.array_equal(np.asarray(tokens), planned):
                raise ValueError(f"expected a schedule for these trajectories, got another trajectory {index}")
        return window

    @cached_property
    def batches(self) -> list[TreeBatch]:
        """The microbatches as tensors, in the order of ``schedule.microbatches``."""
        return build_batches(self.schedule)

    @cached_property
    def dummy(self) -> TreeBatch:
        """One token that nothing is asked of, for ranks that have to run more ops than they have microbatches."""
        tree = RolloutTree.from_trajectories([self.tree.token_ids[:1]])
        return TreeBatch.build(tree, Microbatch(id=DUMMY, rows=[0], owned=[False]))

    def to(self, device: torch.device | str) -> "TreeWindow":
        """The same window with its microbatches on ``device``."""
        moved = copy.copy(self)
        moved.batches = [batch.to(device) for batch in self.batches]
        moved.dummy = self.dummy.to(device)
        return moved

    def _warn_oversized(self) -> None:
        oversized, microbatches = self.schedule.oversized, self.schedule.microbatches
        if not oversized:
            return
        budget = self.schedule.config.max_tokens_per_microbatch
        longest = max(microbatches[i].num_rows for i in oversized)
        warnings.warn(
            f"{len(oversized)} of {len(microbatches)} microbatches hold one trajectory longer than "
            f"max_tokens_per_microbatch={budget} (up to {longest} tokens); each runs alone and needs the memory",
            HartsWarning,
            stacklevel=3,
        )

    def label_rows(self, index: int) -> np.ndarray:
        """Rows of the tree whose log-probs are those of trajectory ``index``, ``[L - 1]``."""
        return self.tree.path(index)[1:]


def _check_world_size(planner: PlannerConfig) -> None:
    """A plan for several ranks has microbatches that nothing here would run: values and gradients would lack them."""
    if planner.world_size != 1:
        raise ValueError(
            f"expected a plan for one rank (world_size=1), got world_size={planner.world_size}: each process runs a "
            "plan of its own trajectories"
        )
