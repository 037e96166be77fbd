"""When what trunks hand over is alive in a string of ops: the one statement of it (NumPy only).

A forward of a trunk (``S`` or ``F``) makes its values; the latest one counts. They live until the last op that reads
them before the trunk's next forward; a ``B`` reads too, since activation checkpointing runs its layers again. A
forward that nobody reads makes none. Gradient sums live from the first dependent's ``B`` to the trunk's own, also
where its values are made again meanwhile.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from harts_hf.planner.execution import DUMMY, Op
from harts_hf.tree import IntArray

# A trunk's id, and the indices of the first and of the last op of its life, both included.
Life = tuple[int, int, int]


def value_lives(ops: Sequence[Op], trunks: Sequence[IntArray]) -> list[Life]:
    """When handed values are alive, in the order in which they are made.

    Args:
        ops: of one rank; dummies hand over nothing.
        trunks: ids of the trunks that each microbatch reads, by id.

    Raises:
        ValueError: an op that reads a trunk before any forward of it.
    """
    made, read = np.full(len(trunks), -1), np.full(len(trunks), -1)
    lives: list[Life] = []
    for time, (kind, index) in enumerate(ops):
        if index == DUMMY:
            continue
        if len(trunks[index]):
            missing = made[trunks[index]] < 0
            if missing.any():
                trunk = int(trunks[index][missing.argmax()])
                raise ValueError(f"microbatch {index} reads states of microbatch {trunk} before any forward of it")
            read[trunks[index]] = time
        if kind != "B":
            if read[index] >= 0:
                lives.append((index, int(made[index]), int(read[index])))
            made[index], read[index] = time, -1
    left = np.flatnonzero(read >= 0)
    lives += zip(left.tolist(), made[left].tolist(), read[left].tolist(), strict=True)
    return sorted(lives, key=lambda life: life[1])


def gradient_lives(ops: Sequence[Op], trunks: Sequence[IntArray]) -> list[Life]:
    """When gradient sums of handed states are alive; arguments as for :func:`value_lives`."""
    first, own = np.full(len(trunks), len(ops)), np.full(len(trunks), -1)
    for time in reversed(range(len(ops))):  # backwards, so that the first dependent is written last and stays
        kind, index = ops[time]
        if kind == "B" and index != DUMMY:
            first[trunks[index]] = time
            own[index] = time
    found = np.flatnonzero(first < own)
    return list(zip(found.tolist(), first[found].tolist(), own[found].tolist(), strict=True))


def handoff_lives(ops: Sequence[Op], trunks: Sequence[IntArray]) -> list[Life]:
    """When values or gradient sums are alive, sorted; arguments as for :func:`value_lives`."""
    begun = {trunk: (first, last) for trunk, first, last in gradient_lives(ops, trunks)}
    lives: list[Life] = []
    for trunk, first, last in sorted(value_lives(ops, trunks)):
        if trunk in begun and first <= begun[trunk][0] <= last:
            last = begun[trunk][1]
        if lives and lives[-1][0] == trunk and first <= lives[-1][2]:  # values made again beside gradient sums
            lives[-1] = (trunk, lives[-1][1], max(last, lives[-1][2]))
        else:
            lives.append((trunk, first, last))
    return lives


def amounts_alive(size: int, parts: Iterable[tuple[int, int, int]]) -> IntArray:
    """``[size]``: at each op the sum of amounts that live from a first to a last op, both included."""
    change = np.zeros(size + 1, np.int64)
    for first, last, amount in parts:
        change[first] += amount
        change[last + 1] -= amount
    return np.cumsum(change)[:-1]
