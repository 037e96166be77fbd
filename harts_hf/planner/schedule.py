"""What a planner decides: microbatches and the order of their forwards and backwards (NumPy only)."""

from dataclasses import dataclass, field

import numpy as np

from harts_hf.tree import IntArray


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
