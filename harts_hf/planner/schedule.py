"""What a planner decides: microbatches and the order of their forwards and backwards (NumPy only)."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from harts_hf.planner.chunks import build_chunk_tree
from harts_hf.planner.config import PlannerConfig
from harts_hf.planner.linear_calls import decompose_chains
from harts_hf.tree import IntArray, RolloutTree

Op = tuple[str, int]


@dataclass(frozen=True, eq=False, kw_only=True)
class Microbatch:
    """Rows of a tree that run in one model forward.

    Attributes:
        id: its place in ``Schedule.microbatches``.
        rows: ``[n]`` rows of the tree that the network computes here, ascending (so in preorder).
        owned: ``[n]`` bool, whether this microbatch is the owner of the row: it scores the row's labels (the tokens
            that stand directly below the row) and counts the row in statistics. A row that is not owned is a prefix
            computed again. Over all microbatches every row of the tree is owned exactly once.
        prefix: ``[p]`` rows that are not computed here but read from the handoff of ``trunks``, ascending; together
            with ``rows`` they are closed under ``parent``.
        trunks: ids of the microbatches whose states are read, the outermost first.
        rank: the rank that runs it.
    """

    id: int
    rows: IntArray
    owned: np.ndarray
    prefix: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    trunks: tuple[int, ...] = ()
    rank: int = 0

    @property
    def num_rows(self) -> int:
        """Network rows."""
        return len(self.rows)


@dataclass(frozen=True, eq=False, kw_only=True)
class Schedule:
    """Microbatches and, per rank, the order of their forwards and backwards.

    Attributes:
        tree: the forest that all row numbers refer to: the given trees one after another, or, where nothing is shared,
            every trajectory on rows of its own. Trajectories keep their numbers, so read ``schedule.tree.path(i)``.
        microbatches: by id.
        config: what was asked for.
        execution: "replay", "nested" or "keep".
        oversized: ids of microbatches over ``config.max_tokens_per_microbatch`` (a single trajectory longer than it).
    """

    tree: RolloutTree
    microbatches: tuple[Microbatch, ...]
    config: PlannerConfig
    execution: str = "replay"
    oversized: tuple[int, ...] = ()

    def ops(self, rank: int = 0) -> list[Op]:
        """The ops of a rank in order: ("S" no-grad forward | "F" forward | "B" backward, microbatch id).

        Raises:
            ValueError: no such rank.
        """
        if not 0 <= rank < self.config.world_size:
            raise ValueError(f"expected rank in [0, {self.config.world_size}), got {rank}")
        own = [microbatch.id for microbatch in self.microbatches if microbatch.rank == rank]
        return [("S", i) for i in own] + [op for i in reversed(own) for op in (("F", i), ("B", i))]

    @property
    def forward_tokens(self) -> int:
        """Network rows of all gradient forwards (F), prefixes computed again included; the S pass is not counted."""
        return sum(microbatch.num_rows for microbatch in self.microbatches)

    @property
    def backward_tokens(self) -> int:
        """Network rows of all backwards."""
        return sum(microbatch.num_rows for microbatch in self.microbatches)

    @cached_property
    def _linear(self) -> tuple[int, int]:
        replay = calls = 0
        for microbatch in self.microbatches:
            position = np.full(self.tree.num_tokens + 1, -1, np.int64)
            position[microbatch.rows] = np.arange(microbatch.num_rows)
            rows = microbatch.rows
            chunks = build_chunk_tree(position[self.tree.parent[rows]], self.tree.depth[rows], self.config.chunk_size)
            replay += chunks.replay_rows
            calls = max(calls, decompose_chains(chunks.parent).num_calls)
        return replay, calls

    @property
    def replay_tokens(self) -> int:
        """Rows that linear layers process again because a branch lies inside a chunk."""
        return self._linear[0]

    @property
    def linear_calls(self) -> int:
        """Sequential linear-attention calls of the microbatch that needs most."""
        return self._linear[1]

    def validate(self) -> None:
        """Proves the invariants.

        Raises:
            AssertionError: an invariant is broken.
        """
        owned = np.zeros(self.tree.num_tokens, np.int64)
        for index, microbatch in enumerate(self.microbatches):
            assert microbatch.id == index and microbatch.num_rows > 0
            assert (np.diff(microbatch.rows) > 0).all()
            here = np.zeros(self.tree.num_tokens + 1, bool)
            here[-1] = True
            here[microbatch.rows] = here[microbatch.prefix] = True
            assert here[self.tree.parent[microbatch.rows]].all()
            owned[microbatch.rows[microbatch.owned]] += 1
            over = microbatch.num_rows > self.config.max_tokens_per_microbatch
            assert over == (index in self.oversized)
        assert (owned == 1).all()
