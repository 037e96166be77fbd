"""Processes within time limits, which go on where an earlier run ended."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.gpu import record

ROOT = Path(__file__).resolve().parents[2]
SHORTEST = 20  # seconds that must be left for a process to begin


@dataclass(frozen=True)
class Job:
    """``python -m benchmarks.gpu``, or another module, in a process of its own.

    Attributes:
        name: of the job and its log.
        stage: of the run that it belongs to.
        seconds: it is killed after.
        arguments: of the module.
        results: files that it writes; if an earlier run of this commit has written all of them without failures, it
            is not run again. Without any it always is.
        variables: of its environment, besides the run's.
        module: to be run.
    """

    name: str
    stage: str
    seconds: float
    arguments: tuple[object, ...]
    results: tuple[Path, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    module: str = "benchmarks.gpu"

    def is_done(self) -> bool:
        """Whether an earlier run has done it."""
        return bool(self.results) and all(map(record.is_done, self.results))

    def start(self, logs: Path, environment: Mapping[str, str]) -> subprocess.Popen:
        """The process, whose log is kept."""
        with (logs / f"{self.name}.log").open("w") as log:
            return subprocess.Popen(
                [sys.executable, "-m", self.module, *map(str, self.arguments)],
                stdout=log, stderr=log, env={**environment, **self.variables}, cwd=ROOT, start_new_session=True,
            )  # fmt: skip


def run_jobs(
    jobs: list[Job],
    at_once: int,
    end: float,
    logs: Path,
    environment: Mapping[str, str],
    save: Callable[[], None],
) -> dict[str, str]:
    """Runs jobs that are not done, ``at_once`` side by side, each until its limit or ``end``. Saves every second.

    Returns:
        What was not begun, was killed or failed, by the job's name.
    """
    waiting, running, wrong = [job for job in jobs if not job.is_done()], {}, {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once and end - time.monotonic() > SHORTEST:
                job = waiting.pop(0)
                running[job.name] = job.start(logs, environment), min(time.monotonic() + job.seconds, end)
            if not running:
                return wrong | {job.name: "not begun: no time left" for job in waiting}
            time.sleep(1)
            for name, (process, limit) in list(running.items()):
                if process.poll() is None and time.monotonic() > limit:
                    _kill(process, says_where=True)
                if process.poll() is not None:
                    del running[name]
                    if process.returncode:
                        wrong[name] = f"exit {process.returncode}"
            save()
        return wrong
    finally:
        for process, _ in running.values():
            _kill(process)


def _kill(process: subprocess.Popen, *, says_where: bool = False) -> None:
    """With all that it has begun: torchrun's workers have sessions of their own, and would keep their GPUs.

    Args:
        process: to be killed.
        says_where: whether stacks go to the log before, of those that have a handler for SIGUSR1 (it ends the others).
    """
    all_of_it = [psutil.Process(process.pid)]
    all_of_it += all_of_it[0].children(recursive=True)
    for number in (signal.SIGUSR1, signal.SIGKILL) if says_where else (signal.SIGKILL,):
        for one in all_of_it:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(number)
        time.sleep(1 if number == signal.SIGUSR1 else 0)
    process.wait()
