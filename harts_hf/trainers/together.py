"""Which rows of a data set belong together, and a sampler that keeps them in one optimizer step.

Supervised data of agents holds many rows of one conversation: a row per turn, each with the history before it. A
random order scatters them over steps, and then nothing is shared.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Sampler

from harts_hf.rollouts.fields import shortened

# Rows belong together where they share at least this part of the shorter one.
LEAST_SHARED = 0.5


def rows_together(rows: Sequence[ArrayLike], most: int) -> list[NDArray[np.int64]]:
    """Groups of rows that begin alike.

    Rows are sorted by their tokens; neighbours that share a prefix of at least half of the shorter row are in one
    group. A group of more than ``most`` rows is divided where its neighbours share the fewest tokens.

    Args:
        rows: token ids, each 1-D, none negative.
        most: rows of a group.

    Returns:
        Indices of each group's rows, in the order of their tokens; every row is in one group.

    Raises:
        ValueError: ``most`` below 1.
    """
    if most < 1:
        raise ValueError(f"expected groups of at least 1 row, got {most}")
    tokens = [np.asarray(row, np.uint32) for row in rows]
    # Bytes of big-endian integers sort as the integers do.
    order = sorted(range(len(tokens)), key=lambda row: tokens[row].astype(">u4").tobytes())
    shared = np.array([_common(tokens[a], tokens[b]) for a, b in pairwise(order)], np.int64)
    lengths = np.array([len(tokens[row]) for row in order], np.int64)
    part = shared / np.maximum(np.minimum(lengths[1:], lengths[:-1]), 1)
    cuts = [0, *(np.flatnonzero(part < LEAST_SHARED) + 1).tolist(), len(order)]
    found = []
    for start, stop in pairwise(cuts):
        found += [np.array(order[a:b]) for a, b in _divided(shared, start, stop, most) if b > a]
    return found


def rows_by_key(keys: Sequence[object], most: int) -> list[NDArray[np.int64]]:
    """Groups of rows with equal keys, in order of appearance, of at most ``most`` rows each.

    Raises:
        ValueError: ``most`` below 1, or a key that cannot be one (a list).
    """
    if most < 1:
        raise ValueError(f"expected groups of at least 1 row, got {most}")
    members: dict[object, list[int]] = {}
    for row, key in enumerate(keys):
        try:
            members.setdefault(key, []).append(row)
        except TypeError as error:
            raise ValueError(f"expected texts or numbers that mark rows of a group, got {shortened(key)}") from error
    return [np.array(of[i : i + most]) for of in members.values() for i in range(0, len(of), most)]


def _common(a: NDArray[np.uint32], b: NDArray[np.uint32]) -> int:
    """Tokens that two rows begin with alike."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def _divided(shared: NDArray[np.int64], start: int, stop: int, most: int) -> list[tuple[int, int]]:
    """``[start, stop)`` in pieces of at most ``most`` rows, in order."""
    found, open_pieces = [], [(start, stop)]
    while open_pieces:
        a, b = open_pieces.pop()
        if b - a <= most:
            found.append((a, b))
            continue
        cut = a + 1 + int(shared[a : b - 1].argmin())
        if shared[a : b - 1].min() == shared[a : b - 1].max():  # equal rows: pieces as large as may be
            cut = a + most
        open_pieces += [(cut, b), (a, cut)]
    return found


class TogetherSampler(Sampler[int]):
    """Every row once per epoch, in random order, rows of a group within one optimizer step.

    Groups are shuffled, then laid into steps: each next place goes to the first of them that still fits into the step,
    and a group is divided only where none does. Within a step each rank's rows stand together, in Accelerate's order
    of batches (one of each rank after the other).

    Args:
        groups: indices of rows; each in one group.
        batch_size: rows of a rank's micro-step.
        accumulation: micro-steps of an optimizer step.
        num_ranks: processes.
        seed: with the epoch it decides the order.

    Raises:
        ValueError: numbers below 1.
    """

    def __init__(
        self,
        groups: Sequence[NDArray[np.int64]],
        *,
        batch_size: int,
        accumulation: int = 1,
        num_ranks: int = 1,
        seed: int = 0,
    ) -> None:
        for name, number in (("batch_size", batch_size), ("accumulation", accumulation), ("num_ranks", num_ranks)):
            if number < 1:
                raise ValueError(f"expected {name} of at least 1, got {number}")
        self.groups, self.seed, self.epoch = list(groups), seed, 0
        self.batch_size, self.accumulation, self.num_ranks = batch_size, accumulation, num_ranks

    def set_epoch(self, epoch: int) -> None:
        """Which epoch's order the next iteration has; Accelerate calls it."""
        self.epoch = epoch

    def __len__(self) -> int:
        return sum(map(len, self.groups))

    def __iter__(self) -> Iterator[int]:
        rng = np.random.default_rng([self.seed, self.epoch])
        per_step = self.batch_size * self.accumulation * self.num_ranks
        for step in _steps([self.groups[i] for i in rng.permutation(len(self.groups))], per_step):
            yield from self._by_rank(step, per_step)

    def _by_rank(self, step: list[int], per_step: int) -> list[int]:
        if self.num_ranks == 1 or len(step) < per_step:
            return step
        batches = np.array(step).reshape(self.num_ranks, self.accumulation, self.batch_size)
        return batches.transpose(1, 0, 2).ravel().tolist()


def _steps(groups: Sequence[NDArray[np.int64]], per_step: int) -> Iterator[list[int]]:
    """Rows of one step after the other."""
    waiting: dict[int, deque[tuple[int, list[int]]]] = {}  # by size, in order
    for place, group in enumerate(groups):
        rows = group.tolist()
        for begin in range(0, len(rows), per_step):
            piece = rows[begin : begin + per_step]
            waiting.setdefault(len(piece), deque()).append((place, piece))
    sizes = sorted(waiting)
    step: list[int] = []
    while sizes:
        room = per_step - len(step)
        fitting = sizes[: bisect_right(sizes, room)]
        size = min(fitting or sizes, key=lambda one: waiting[one][0])
        place, piece = waiting[size].popleft()
        if not waiting[size]:
            sizes.remove(size)
        step += piece[:room]
        if len(piece) > room:  # nothing fits: divided
            rest = piece[room:]
            waiting.setdefault(len(rest), deque()).appendleft((place, rest))
            sizes = sorted({*sizes, len(rest)})
        if len(step) == per_step:
            yield step
            step = []
    if step:
        yield step
