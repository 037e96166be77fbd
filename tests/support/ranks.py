"""Ranks without processes: what one process sees of others that are only said to be there."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from harts_hf.planner.execution import OP_KINDS
from harts_hf.runtime import OtherRankError, Ranks


class OtherRankHas(Ranks):
    """Two ranks that plan their own; the other one has ``number`` microbatches in the replay execution."""

    count = 2

    def __init__(self, number: int) -> None:
        self.number = number

    def gather(self, *numbers: int) -> list[tuple[int, ...]]:
        """The other one says its number of microbatches to whatever it is asked."""
        return [numbers, (self.number,) * len(numbers)]

    def gather_arrays(self, arrays: list) -> list[list]:
        """The other one's string of ops."""
        word = "S" * self.number + "FB" * self.number
        return [list(arrays), [np.array([OP_KINDS.index(kind) for kind in word])]]


class Meeting:
    """Where threads that stand for processes meet.

    Args:
        count: of them.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._barrier = threading.Barrier(count, timeout=20)
        self._found: list[Any] = [None] * count

    def exchange(self, index: int, own: Any) -> list[Any]:
        """What each brought, by number."""
        self._found[index] = own
        self._barrier.wait()
        found = list(self._found)
        self._barrier.wait()
        return found


class ThreadRanks(Ranks):
    """A process that is a thread: collectives are meetings."""

    def __init__(self, meeting: Meeting, index: int) -> None:
        self.meeting, self.index, self.count = meeting, index, meeting.count

    def gather(self, *numbers: int) -> list[tuple[int, ...]]:
        """See :class:`Ranks`."""
        return self.meeting.exchange(self.index, numbers)

    def gather_arrays(self, arrays: list) -> list[list]:
        """See :class:`Ranks`."""
        return self.meeting.exchange(self.index, [np.array(array) for array in arrays])

    def add_up(self, tensors: Any) -> list[torch.Tensor]:
        """See :class:`Ranks`."""
        found = self.meeting.exchange(self.index, [tensor.clone() for tensor in tensors])
        return [torch.stack(same).sum(0) for same in zip(*found, strict=True)]

    @contextmanager
    def together(self) -> Iterator[None]:
        """See :class:`Ranks`."""
        error: Exception | None = None
        try:
            yield
        except Exception as found:
            error = found
        errors = self.meeting.exchange(self.index, error)
        if error is not None:
            raise error
        for rank, found in enumerate(errors):
            if found is not None:
                raise OtherRankError(f"process {rank} raised {type(found).__name__}: {found}")


def on_ranks(count: int, work: Callable[[ThreadRanks], Any]) -> list[Any]:
    """What ``work`` gives on each of some ranks, or the error that it raised there."""
    meeting, found = Meeting(count), [None] * count

    def run(index: int) -> None:
        try:
            found[index] = work(ThreadRanks(meeting, index))
        except threading.BrokenBarrierError:
            found[index] = TimeoutError(f"rank {index} waited for others")
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
