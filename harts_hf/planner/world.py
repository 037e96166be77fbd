"""What a schedule asks of all ranks together: balance, work done twice, dummies, bytes exchanged (NumPy only)."""

from dataclasses import dataclass

import numpy as np

from harts_hf.planner.schedule import Schedule
from harts_hf.planner.spans import span_size, union

# Token ids, values and coefficients travel as numbers of this size (int64, float64).
BYTES_PER_NUMBER = 8


@dataclass(frozen=True, kw_only=True)
class WorldCounts:
    """Counts over all ranks of a schedule.

    Attributes:
        mean_seconds: estimated seconds of a rank's own ops, the mean over ranks (dummies and waiting left out).
        slowest_seconds: those of the slowest rank.
        idle_ranks: ranks without a microbatch.
        repeated_tokens: rows that a rank computes although one before it does too: a row on ``k`` ranks is ``k - 1``.
        tokens_per_unique: rows computed by all ranks over rows of the forest, 1 if no two ranks compute one row.
        dummies: ops that a rank runs on one token without weight, so that all ranks run strings of the same kinds.
        ops: all ops of all ranks, dummies among them.
        exchanged_bytes: what each rank gets from the others in a step at most: all trajectories' token ids, and for
            every row of the forest its values and as many coefficients, 8 bytes each.
    """

    mean_seconds: float
    slowest_seconds: float
    idle_ranks: int
    repeated_tokens: int
    tokens_per_unique: float
    dummies: int
    ops: int
    exchanged_bytes: int

    @property
    def balance(self) -> float:
        """Mean over slowest rank, from 0 to 1."""
        return self.mean_seconds / self.slowest_seconds if self.slowest_seconds else 1.0


def count_world(schedule: Schedule, *, num_values: int = 1) -> WorldCounts:
    """Counts over all ranks.

    Args:
        schedule: of any number of ranks; on one rank nothing is repeated and nothing exchanged.
        num_values: values per row that a loss asks for: 1 for log-probs alone, 2 with entropies.

    Raises:
        ValueError: ``num_values`` below 1.

    Complexity: NumPy work over the spans of all microbatches, one Python step per op.
    """
    if num_values < 1:
        raise ValueError(f"expected num_values of at least 1, got {num_values}")
    world_size = schedule.config.world_size
    by_rank: dict[int, list[np.ndarray]] = {}
    for microbatch in schedule.microbatches:
        by_rank.setdefault(microbatch.rank, []).append(microbatch.row_spans)
    computed = sum(span_size(union(spans)) for spans in by_rank.values())
    seconds = [sum(map(schedule.op_seconds, ops)) for ops in schedule.rank_ops]
    num_ops = world_size * len(schedule.ops(0))
    tree = schedule.tree
    numbers = tree.num_expanded_tokens + 2 * num_values * tree.num_tokens
    return WorldCounts(
        mean_seconds=sum(seconds) / world_size,
        slowest_seconds=max(seconds),
        idle_ranks=world_size - len(by_rank),
        repeated_tokens=computed - tree.num_tokens,
        tokens_per_unique=computed / tree.num_tokens,
        dummies=num_ops - sum(map(len, schedule.rank_ops)),
        ops=num_ops,
        exchanged_bytes=BYTES_PER_NUMBER * numbers if world_size > 1 else 0,
    )
