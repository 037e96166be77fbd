"""When the states that a trunk hands over are made and freed in a string of ops."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harts_hf.batch import Kind, TreeBatch
from harts_hf.modeling.handoff import HandoffError
from harts_hf.planner.execution import DUMMY, Op


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
    """Lives of the values of every trunk.

    A forward of a trunk (``S`` or ``F``) makes its values. They live until the last op of a dependent before the
    trunk's next forward; that may be a ``B``, since activation checkpointing reads them again there. A forward that
    nobody reads keeps nothing.

    Raises:
        HandoffError: an op that reads the values of a trunk before any forward of it.
    """
    keeps = [False] * len(ops)
    drops: list[list[int]] = [[] for _ in ops]
    made: dict[int, int] = {}
    read: dict[int, int] = {}

    def close(trunk: int) -> None:
        if trunk in read:
            keeps[made[trunk]] = True
            drops[read.pop(trunk)].append(trunk)

    for place, (kind, index) in enumerate(ops):
        if index == DUMMY:
            continue
        for trunk in _trunks_of(batches[index]):
            if trunk not in made:
                raise HandoffError(f"microbatch {index} reads states of microbatch {trunk} before any forward of it")
            read[trunk] = place
        if kind in "SF":
            close(index)
            made[index] = place
    for trunk in list(read):
        close(trunk)
    return Lives(keeps=tuple(keeps), drops=tuple(map(tuple, drops)))


def count_readers(batches: Iterable[TreeBatch]) -> dict[tuple[int, Kind], int]:
    """For each trunk and kind, how many microbatches read it."""
    counts: dict[tuple[int, Kind], int] = {}
    for batch in batches:
        for kind, table in batch.imports.items():
            for trunk in table.trunks:
                counts[trunk, kind] = counts.get((trunk, kind), 0) + 1
    return counts


def _trunks_of(batch: TreeBatch) -> set[int]:
    return {trunk for table in batch.imports.values() for trunk in table.trunks}
