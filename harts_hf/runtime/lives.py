"""When the states that a trunk hands over are made and freed in a string of ops."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from harts_hf.batch import HandedKind, TreeBatch
from harts_hf.modeling.handoff import HandoffError
from harts_hf.planner.execution import Op
from harts_hf.planner.lives import value_lives
from harts_hf.tree import IntArray


@dataclass(frozen=True, kw_only=True)
class Lives:
    """Lives of handed values over a string of ops.

    Attributes:
        keeps: for each op, whether it is a forward whose exports somebody reads.
        drops: for each op, the trunks whose values are freed after it.
    """

    keeps: tuple[bool, ...]
    drops: tuple[tuple[int, ...], ...]


def handoff_lives(ops: Sequence[Op], batches: Sequence[TreeBatch]) -> Lives:
    """Lives of the values of every trunk, as :func:`harts_hf.planner.lives.value_lives` has them.

    Raises:
        HandoffError: an op that reads the values of a trunk before any forward of it.
    """
    keeps = [False] * len(ops)
    drops: list[list[int]] = [[] for _ in ops]
    try:
        lives = value_lives(ops, [_trunks_of(batch) for batch in batches])
    except ValueError as error:
        raise HandoffError(str(error)) from None
    for trunk, first, last in lives:
        keeps[first] = True
        drops[last].append(trunk)
    return Lives(keeps=tuple(keeps), drops=tuple(map(tuple, drops)))


def count_readers(batches: Iterable[TreeBatch]) -> dict[tuple[int, HandedKind], int]:
    """For each trunk and kind, how many microbatches read it."""
    counts: dict[tuple[int, HandedKind], int] = {}
    for batch in batches:
        for kind, table in batch.imports.items():
            for trunk in table.trunks:
                counts[trunk, kind] = counts.get((trunk, kind), 0) + 1
    return counts


def _trunks_of(batch: TreeBatch) -> IntArray:
    return np.array(sorted({trunk for table in batch.imports.values() for trunk in table.trunks}), np.int64)
