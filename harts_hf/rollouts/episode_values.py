"""Values of histories on one prompt's tree: mean rewards of the episodes that pass through them (NumPy only)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from harts_hf.tree import RolloutTree

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class EpisodeValues:
    """A tree whose trajectories belong to episodes, and the rewards of those.

    An episode passes through a row if one of its trajectories does, and counts there once, however many do.

    Args:
        trajectories: token ids, ``[L_i]`` each.
        rewards: ``[B]``, equal for trajectories of one episode; NaN where the episode could not be scored.
        episodes: ``[B]`` integers, equal for trajectories of one episode.

    Attributes:
        tree: of the trajectories.
        values: ``[N + 1]`` float64, the mean reward of the scored episodes through each row, and last that of all;
            0 where there are none.
        counts: ``[N + 1]`` int64, episodes through each row, scored or not, and last their number.
        episode: ``[B]`` int64, episodes numbered anew from 0 on.
        rewards: ``[E]`` float64, one per episode.
    """

    def __init__(self, trajectories: Sequence[ArrayLike], rewards: FloatArray, episodes: IntArray) -> None:
        self.tree = RolloutTree.from_trajectories(trajectories)
        _, first, self.episode = np.unique(episodes, return_index=True, return_inverse=True)
        self.rewards = rewards[first]
        ends, signs, owners = self._once()
        scored = ~np.isnan(self.rewards)[owners]

        def below(weights: FloatArray) -> FloatArray:
            # Row N stands for what is before every first token.
            before = np.zeros(self.tree.num_tokens + 2)
            np.cumsum(np.bincount(ends, weights=weights, minlength=self.tree.num_tokens + 1), out=before[1:])
            return np.append(before[self.tree.subtree_end] - before[: self.tree.num_tokens], before[-1])

        counts = below(signs * scored)
        sums = below(np.where(scored, signs * self.rewards[owners], 0.0))
        self.values = np.divide(sums, counts, out=np.zeros(len(counts)), where=counts > 0)
        self.counts = np.rint(below(signs)).astype(np.int64)

    def through(self, row: int) -> set[int]:
        """The scored episodes through a row."""
        ends = self.tree.end_rows
        inside = self.episode[(ends >= row) & (ends < self.tree.subtree_end[row])]
        return {int(episode) for episode in inside if not np.isnan(self.rewards[episode])}

    def _once(self) -> tuple[IntArray, FloatArray, IntArray]:
        """Rows, signs and episodes whose sums below a row count each episode once.

        That is +1 where each of an episode's trajectories ends, and, those being sorted, -1 where each parts from the
        one before: what two of them share is counted once.
        """
        tree = self.tree
        order = np.lexsort((tree.end_rows, self.episode))
        pairs = order[:-1], order[1:]
        same = self.episode[pairs[0]] == self.episode[pairs[1]]
        joints = [_last_common_row(tree, a, b) for a, b in zip(pairs[0][same], pairs[1][same], strict=True)]
        ends = np.concatenate([tree.end_rows, np.array(joints, np.int64)])
        signs = np.concatenate([np.ones(len(order)), -np.ones(len(joints))])
        return ends, signs, np.concatenate([self.episode, self.episode[pairs[0][same]]])


def _last_common_row(tree: RolloutTree, first: int, second: int) -> int:
    """The deepest row that two trajectories share; the number of rows if there is none."""
    a, b = tree.path(first), tree.path(second)
    length = min(len(a), len(b))
    common = int(np.argmin(np.append(a[:length] == b[:length], False)))
    return int(a[common - 1]) if common else tree.num_tokens
