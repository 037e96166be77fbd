"""A planned window: the tree of an update, its schedule, and its microbatches as tensors."""

import copy
import warnings
from collections.abc import Sequence
from dataclasses import replace
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
        trajectories: 1-D integer arrays of token ids; at least one, none empty. Or their tree.
        planner: limits; the defaults if None.
        vocab_size: if given, token ids are checked against it.
        rank: of a plan for several ranks, the one whose microbatches run here; every rank has to hold the same
            trajectories, in the same order.

    Attributes:
        rollout_tree: the prefix tree of the trajectories.
        schedule: the plan, of all ranks.
        tree: the tree that the plan's rows refer to: ``rollout_tree``, or, where the plan shares nothing, every
            trajectory on rows of its own.
        rank: the one whose microbatches are :attr:`batches`; None for a plan for one rank.

    Raises:
        ValueError: no trajectory, an empty one, token ids outside the vocabulary, or a plan for several ranks without
            a rank of it.
    """

    _device: torch.device | str = "cpu"

    def __init__(
        self,
        trajectories: Sequence[ArrayLike] | RolloutTree,
        planner: PlannerConfig | None = None,
        *,
        vocab_size: int | None = None,
        rank: int | None = None,
    ) -> None:
        tree = trajectories if isinstance(trajectories, RolloutTree) else RolloutTree.from_trajectories(trajectories)
        if vocab_size is not None and tree.token_ids.max() >= vocab_size:
            token = int(tree.token_ids.max())
            index = next(i for i in range(tree.num_trajectories) if token in tree.token_ids[tree.path(i)])
            raise ValueError(
                f"expected token ids below the vocabulary size {vocab_size}, got {token} in trajectory {index}"
            )
        self.rollout_tree = tree
        planner = planner or PlannerConfig()
        self.rank = _checked_rank(planner, rank)
        self.schedule: Schedule = plan_window(tree, planner)
        self.tree = self.schedule.tree
        self._warn_oversized()

    @classmethod
    def from_schedule(
        cls, trajectories: Sequence[ArrayLike], schedule: Schedule, *, rank: int | None = None
    ) -> "TreeWindow":
        """A window with a schedule of one's own.

        Raises:
            ValueError: a schedule for another tree, or for several ranks without a rank of it.
        """
        window = cls.__new__(cls)
        window.rank = _checked_rank(schedule.config, rank)
        window.rollout_tree = RolloutTree.from_trajectories(trajectories)
        window.schedule, window.tree = schedule, schedule.tree
        theirs = [schedule.tree.token_ids[schedule.tree.path(i)] for i in range(schedule.tree.num_trajectories)]
        if len(theirs) != len(trajectories):
            raise ValueError(f"expected a schedule for {len(trajectories)} trajectories, got one for {len(theirs)}")
        for index, (tokens, planned) in enumerate(zip(trajectories, theirs, strict=True)):
            if not np.array_equal(np.asarray(tokens), planned):
                raise ValueError(f"expected a schedule for these trajectories, got another trajectory {index}")
        return window

    @property
    def is_of_all_ranks(self) -> bool:
        """Whether the plan is for several ranks, of which this is one."""
        return self.rank is not None

    @cached_property
    def part(self) -> Schedule:
        """What runs here: the schedule, or of a plan for several ranks this rank's microbatches, numbered from 0."""
        return self.schedule if self.rank is None else _part_of(self.schedule, self.rank)

    @cached_property
    def batches(self) -> list[TreeBatch]:
        """The microbatches that run here as tensors, in the order of ``part.microbatches``; none on an idle rank."""
        return build_batches(self.part) if self.part.microbatches else []

    @cached_property
    def dummy(self) -> TreeBatch:
        """One token that nothing is asked of, for ranks that have to run more ops than they have microbatches.

        Made on first use: most windows have none.
        """
        tree = RolloutTree.from_trajectories([self.tree.token_ids[:1]])
        return TreeBatch.build(tree, Microbatch(id=DUMMY, rows=[0], owned=[False])).to(self._device)

    def to(self, device: torch.device | str) -> "TreeWindow":
        """The same window with its microbatches on ``device``."""
        moved = copy.copy(self)
        moved.batches = [batch.to(device) for batch in self.batches]
        moved._device = device
        vars(moved).pop("dummy", None)
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


def _checked_rank(planner: PlannerConfig, rank: int | None) -> int | None:
    """A plan for several ranks has microbatches that run elsewhere: without them, gradients would be wrong."""
    if rank is None and planner.world_size != 1:
        raise ValueError(
            f"expected a plan for one rank (world_size=1), got world_size={planner.world_size}: only TreeUpdate runs "
            "plans for several ranks, on as many processes"
        )
    if rank is not None and not 0 <= rank < planner.world_size:
        raise ValueError(f"expected rank in [0, {planner.world_size}), got {rank}")
    return None if planner.world_size == 1 else rank


def _part_of(schedule: Schedule, rank: int) -> Schedule:
    """The schedule of a rank alone: it owns some of the tree's rows, so it would not prove valid."""
    own = [microbatch for microbatch in schedule.microbatches if microbatch.rank == rank]
    number = {microbatch.id: index for index, microbatch in enumerate(own)}
    microbatches = tuple(
        Microbatch.from_spans(
            id=index,
            row_spans=microbatch.row_spans,
            owned_spans=microbatch.owned_spans,
            prefix_spans=microbatch.prefix_spans,
            trunks=tuple(number[trunk] for trunk in microbatch.trunks),
        )
        for index, microbatch in enumerate(own)
    )
    ops = tuple((kind, number[index]) for kind, index in schedule.ops(rank, dummies=False))
    config = replace(schedule.config, world_size=1)
    return replace(schedule, microbatches=microbatches, rank_ops=(ops,), config=config, accounts=None)
