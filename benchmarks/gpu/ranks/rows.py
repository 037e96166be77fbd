"""What a trainer of several processes is played: the trajectories of some groups, each rank its part of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.whole.step import group

DRY_TOKENS, DRY_OWN, DRY_ROWS = 160, 30, 6


def _cut(tokens: np.ndarray) -> np.ndarray:
    """Its first tokens, which others share, and its last ones, which they do not."""
    return np.concatenate([tokens[: DRY_TOKENS - DRY_OWN], tokens[-DRY_OWN:]])


@dataclass(frozen=True, eq=False)
class Rows:
    """Trajectories of random tokens in the shapes of some groups, and how many last tokens of each are scored.

    Attributes:
        tokens: of every trajectory, group after group; as many as the processes divide.
        scored: of each.
    """

    tokens: list[np.ndarray]
    scored: list[int]

    @classmethod
    def of(cls, shapes: Path, groups: Sequence[int], vocab: int, world: int, *, dry: bool) -> "Rows":
        """Groups share no prefix: each token is moved by its group's number, and stays within the vocabulary."""
        tokens: list[np.ndarray] = []
        scored: list[int] = []
        for place, number in enumerate(groups):
            trajectories, own = group(shapes, number, vocab)
            if dry:
                trajectories, own = [_cut(one) for one in trajectories[:DRY_ROWS]], [20] * DRY_ROWS
            tokens += [2 + (one - 2 + place) % (vocab - 2) for one in trajectories]
            scored += own
        keep = len(tokens) - len(tokens) % world
        return cls(tokens[:keep], scored[:keep])

    def of_rank(self, rank: int, world: int) -> dict[str, list[Any]]:
        """What a rollout function of one rank answers: its part of the rows, one after another."""
        mine = slice(rank * len(self.tokens) // world, (rank + 1) * len(self.tokens) // world)
        pairs = list(zip(self.tokens[mine], self.scored[mine], strict=True))
        return {
            "prompt_ids": [one[:-own].tolist() for one, own in pairs],
            "completion_ids": [one[-own:].tolist() for one, own in pairs],
            "logprobs": [[-1.0] * own for _, own in pairs],
        }
