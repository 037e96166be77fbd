"""Running many agents at a time, each in a thread, none for longer than its time-out."""

import logging
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from harts_hf.rollouts.gateway.agents import Agent, AgentAccess, AgentFailure, last_lines
from harts_hf.rollouts.gateway.sessions import Session

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AgentJob:
    """An episode that is to be played."""

    task: Any
    session: Session
    access: AgentAccess


@dataclass(frozen=True, kw_only=True)
class AgentOutcome:
    """How an agent ended.

    Attributes:
        result: what it returned; None for a failure.
        failure: or None.
        seconds: that it took.
    """

    result: Any
    failure: AgentFailure | None
    seconds: float


class AgentRuns:
    """Plays episodes; use it as a context manager, so that no agent outlives it.

    Args:
        agent: plays them.
        jobs: the episodes.
        timeout: seconds that each may take.
        max_concurrent: episodes at a time.
        on_done: called, in another thread, after each.

    Attributes:
        outcomes: one per job; None while it runs or waits.
    """

    def __init__(
        self,
        agent: Agent,
        jobs: Sequence[AgentJob],
        *,
        timeout: float,
        max_concurrent: int,
        on_done: Callable[[], None],
    ) -> None:
        self.outcomes: list[AgentOutcome | None] = [None] * len(jobs)
        self._agent = agent
        self._jobs = list(jobs)
        self._timeout = timeout
        self._max_concurrent = max_concurrent
        self._on_done = on_done
        self._lock = threading.RLock()
        self._stopped = threading.Event()
        self._started: dict[int, float] = {}
        self._waiting = list(range(len(jobs)))[::-1]
        self._num_running = 0
        self._logged: set[str] = set()  # kinds of failures
        self._has_said_further = False

    def __enter__(self) -> "AgentRuns":
        self._start_more()
        return self

    def __exit__(self, *error: object) -> None:
        """Ends what still runs. Functions that cannot be ended find their episodes closed."""
        with self._lock:
            self._waiting.clear()
            self._stopped.set()
            running = [index for index in self._started if self.outcomes[index] is None]
        for job in self._jobs:
            job.session.close()
        # Commands are killed by their own threads, which have to be given the time for it.
        end = time.monotonic() + self._agent.grace
        for index in running:
            while self.outcomes[index] is None and time.monotonic() < end:
                time.sleep(0.01)

    def is_done(self) -> bool:
        """Whether every episode has an outcome; gives up those that are over their time."""
        with self._lock:
            now = time.monotonic()
            for index, started in list(self._started.items()):  # giving one up starts the next
                if self.outcomes[index] is None and now > started + self._timeout + self._agent.grace:
                    self._settle(index, None, AgentFailure("timeout", f"not done after {self._timeout:g} s"))
            return all(outcome is not None for outcome in self.outcomes)

    def _start_more(self) -> None:
        with self._lock:
            while self._waiting and self._num_running < self._max_concurrent:
                index = self._waiting.pop()
                self._num_running += 1
                self._started[index] = time.monotonic()
                threading.Thread(target=self._play, args=(index,), name=f"agent-{index}", daemon=True).start()

    def _play(self, index: int) -> None:
        job = self._jobs[index]
        result, failure = None, None
        try:
            result = self._agent.run(job.task, job.access, timeout=self._timeout, stopped=self._stopped)
        except AgentFailure as error:
            failure = error
        except BaseException:  # SystemExit too: it ends an episode, not the run
            failure = AgentFailure("raised", last_lines(traceback.format_exc()))
        self._settle(index, result, failure)
        self._on_done()

    def _settle(self, index: int, result: Any, failure: AgentFailure | None) -> None:
        with self._lock:
            if self.outcomes[index] is not None:  # given up before
                return
            job = self._jobs[index]
            job.session.close()
            job.session.result = result
            turns = job.session.recording.num_turns
            if failure is None and not turns:
                failure = AgentFailure("no_request", "it ended without asking for a turn")
            elif failure is not None and failure.kind in ("raised", "exit_code") and job.session.counts["over_limit"]:
                failure = AgentFailure("max_turns", f"it failed after its last turn; {failure}")
            if failure is not None and not self._stopped.is_set():
                self._log(index, failure)
            seconds = time.monotonic() - self._started[index]
            self.outcomes[index] = AgentOutcome(result=result, failure=failure, seconds=seconds)
            self._num_running -= 1
            self._start_more()

    def _log(self, index: int, failure: AgentFailure) -> None:
        """Logs the first failure of each kind in full; all are counted."""
        if failure.kind not in self._logged:
            self._logged.add(failure.kind)
            text = self._jobs[index].access.redacted(str(failure))
            logger.warning("the agent of episode %d failed (%s): %s", index, failure.kind, text)
        elif not self._has_said_further:
            self._has_said_further = True
            logger.warning("further failures of the same kinds are counted (agent/failed), not shown")
