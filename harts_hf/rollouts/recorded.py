"""What a rollout file holds: trajectories in groups, and what became of its conversations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from harts_hf.forest import concatenate_trees
from harts_hf.planner.text import counted
from harts_hf.tree import IntArray, RolloutTree


@dataclass(frozen=True, eq=False, kw_only=True)
class Rollout:
    """One trajectory of ``L`` tokens as a file gives it.

    Attributes:
        token_ids: ``[L]`` int64; None in a shape file.
        loss_mask: ``[L]`` bool, the tokens that the policy wrote; None if the file does not say.
        advantage: a float, or ``[L]`` float64 per token, or None.
        reward: a float or None.
        old_logprobs: ``[L]`` float64, log-prob of each token when it was sampled (entry 0 has no predictor), NaN where
            unknown, or None.
        episode: which rollout of its group it is a sample of: the rows of a conversation have the same; None if the
            file does not say, and then it is a rollout of its own.
        where: the row that it was read from, such as ``line 3``, for messages; None if it was not read.
    """

    token_ids: IntArray | None
    loss_mask: NDArray[np.bool_] | None = None
    advantage: float | NDArray[np.float64] | None = None
    reward: float | None = None
    old_logprobs: NDArray[np.float64] | None = None
    episode: str | int | None = None
    where: str | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class RolloutGroup:
    """The trajectories of one group.

    Attributes:
        name: the group as the file names it.
        rollouts: its trajectories in the order of the file.
        shape: the tree that a shape file gives; None for a rollout file.
    """

    name: str
    rollouts: tuple[Rollout, ...]
    shape: RolloutTree | None = None

    @cached_property
    def tree(self) -> RolloutTree:
        """The rollout tree; trajectory ``i`` is ``rollouts[i]``."""
        if self.shape is not None:
            return self.shape
        return RolloutTree.from_trajectories([rollout.token_ids for rollout in self.rollouts])  # type: ignore[misc]

    @property
    def rewards(self) -> list[float | None]:
        """Reward of each trajectory, None where the file has none."""
        return [rollout.reward for rollout in self.rollouts]


@dataclass(frozen=True, eq=False, kw_only=True)
class RolloutFile:
    """What a file holds, and what became of it.

    Attributes:
        groups: in the order of their first rows.
        form: the name of the form, as ``--format`` takes it.
        num_conversations: how many were turned into samples; 0 where rows have token ids.
        samples_per: ``"turn"`` or ``"conversation"``.
        notes: what of the conversations did not become a sample, by name, and how often.
        names_groups: whether rows say their group; otherwise the file is one.
        likely_group_keys: where they do not: keys that may say it, with the number of groups that they would make.
    """

    groups: list[RolloutGroup]
    form: str
    num_conversations: int = 0
    samples_per: str = "turn"
    notes: Mapping[str, int] = field(default_factory=dict)
    names_groups: bool = True
    likely_group_keys: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_rollouts(self) -> int:
        """Episodes; a trajectory of none is one by itself."""
        return sum(
            len({place if one.episode is None else (one.episode,) for place, one in enumerate(group.rollouts)})
            for group in self.groups
        )

    @property
    def group_hint(self) -> str | None:
        """What to tell a person whose several rollouts are one group because no row says which it is of."""
        rollouts = self.num_rollouts
        if self.names_groups or rollouts < 2:
            return None
        likely = [f"{key} makes {number:,} groups" for key, number in self.likely_group_keys.items()]
        keys = ", ".join(likely) or "KEY names a key of the rows that does"
        return f"no row says its group, so all {rollouts:,} rollouts are one group, and one step: --group-key {keys}"

    @property
    def summary(self) -> list[str]:
        """Lines that tell a person what was made of the file."""
        samples = sum(len(group.rollouts) for group in self.groups)
        if not self.num_conversations:
            return [f"{counted(samples, 'trajectory', 'trajectories')} ({self.form})"]
        of = f"{counted(self.num_conversations, 'conversation')} ({self.form})"
        lines = [f"{counted(samples, 'sample')} of {of}, one per {self.samples_per}"]
        return [*lines, *(f"{number:,} {note}" for note, number in self.notes.items())]


def tree_of_groups(groups: Sequence[RolloutGroup]) -> RolloutTree:
    """One tree of all trajectories, in their order, as a training step merges them.

    Of shapes, which have no tokens to compare, groups stay apart.

    Raises:
        ValueError: no group.
    """
    if len(groups) > 1 and all(group.shape is None for group in groups):
        return RolloutTree.from_trajectories([one.token_ids for group in groups for one in group.rollouts])  # type: ignore[misc]
    return concatenate_trees([group.tree for group in groups])
