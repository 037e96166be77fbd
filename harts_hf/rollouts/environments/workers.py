"""Where environments are called: in the sampling thread, or in others that can be left behind when they hang."""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from harts_hf.rollouts.environments.failures import EpisodeFailure, guarded


@dataclass(eq=False)
class _Job:
    call: Callable[[], Any]
    future: "Future[Any]" = field(default_factory=Future)
    started: float | None = None


class Workers:
    """Calls environments. Use it as a context manager.

    Without a time-out and with one worker, calls happen at once, in the thread that submits them. Otherwise they
    happen in as many threads. One that is over its time cannot be ended: its call fails, it is left to itself, and
    another thread takes its place.

    Args:
        timeout: seconds that a call may take, or None.
        count: calls at a time. With one, all calls happen in one thread as long as none hangs.
        on_done: called, in another thread, after each call.

    Raises:
        ValueError: numbers out of range.
    """

    def __init__(self, *, timeout: float | None, count: int, on_done: Callable[[], None]) -> None:
        if timeout is not None and not timeout > 0:
            raise ValueError(f"expected an environment_timeout above 0 or None, got {timeout}")
        if count < 1:
            raise ValueError(f"expected environment_workers of at least 1, got {count}")
        self._timeout = timeout
        self._count = count
        self._on_done = on_done
        self._is_direct = timeout is None and count == 1
        self._waiting: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._running: set[_Job] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> "Workers":
        if not self._is_direct:
            for _ in range(self._count):
                self._start()
        return self

    def __exit__(self, *error: object) -> None:
        for _ in range(self._count):
            self._waiting.put(None)

    def submit(self, call: Callable[[], Any]) -> "Future[Any]":
        """Has ``call`` called.

        Returns:
            A future of what it returns. Its exception is an :class:`EpisodeFailure`, or a ``KeyboardInterrupt`` (which
            is raised at once in this thread).
        """
        job = _Job(call)
        if not self._is_direct:
            self._waiting.put(job)
            return job.future
        try:
            job.future.set_result(guarded(call))
        except EpisodeFailure as failure:
            job.future.set_exception(failure)
        return job.future

    def expire(self) -> None:
        """Fails the calls that are over their time; to be called now and then while one waits."""
        if self._timeout is None:
            return
        with self._lock:
            late = [
                job
                for job in self._running
                if job.started is not None and time.monotonic() > job.started + self._timeout
            ]
            self._running.difference_update(late)
        for job in late:
            self._start()
            job.future.set_exception(EpisodeFailure("timeout", f"a call was not over after {self._timeout:g} s"))

    def _start(self) -> None:
        threading.Thread(target=self._work, name="environments", daemon=True).start()

    def _work(self) -> None:
        while (job := self._waiting.get()) is not None:
            with self._lock:
                job.started = time.monotonic()
                self._running.add(job)
            result, error = None, None
            try:
                result = guarded(job.call)
            except (EpisodeFailure, KeyboardInterrupt) as found:
                error = found
            with self._lock:
                if job not in self._running:  # it was given up, and another thread has taken this one's place
                    return
                self._running.remove(job)
            if error is None:
                job.future.set_result(result)
            else:
                job.future.set_exception(error)
            self._on_done()
