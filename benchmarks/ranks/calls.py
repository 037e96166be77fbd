"""A call: jobs on one host, each in processes of its own within a time limit."""

import argparse
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu import processes, record, runs, site
from benchmarks.ranks.jobs import WORKLOADS, Job, jobs_for, waves_of

LIMIT_FACTOR = 2.0  # of what a job is thought to take; one begins if at least its part is left
COLD = 240.0  # seconds that the first jobs of a call have besides: a fresh machine tunes and compiles
SHOWN = 1500  # characters of the log of a job that failed
DRY_SECONDS = 1800.0  # of a job on a CPU that others use
KILL_LIMIT = 60.0  # seconds within which all processes have to have ended


def command_of(job: Job, options: argparse.Namespace, result: Path) -> tuple[str, tuple[object, ...]]:
    """Module and arguments that run a job."""
    more: list[object] = ["--dry-run"] if options.dry_run else []
    more += ["--memory", options.memory] if options.memory else []
    own = ("run", job.name, "--shapes", options.shapes, "--out", result, *more)
    if job.backend == "one":
        return "benchmarks.ranks", own
    launcher = ("--standalone", "--nproc_per_node", job.processes, "-m", "benchmarks.ranks")
    return "torch.distributed.run", (*launcher, *own)


class Bundle:
    """All of this commit's result files of a folder in one, which is written anew when one of them has changed: few
    files come back from a machine that is lent."""

    def __init__(self, work: Path, path: Path) -> None:
        self.work, self.path = work, path
        self._stamps: dict[Path, int] = {}

    def unpack(self, earlier: Path) -> None:
        """The results of an earlier call, where this host has none of a job."""
        for part in record.parts_in(earlier):
            path = self.work / f"{part['job']}.json"
            if not path.exists():
                record.write(path, part)

    def save(self) -> None:
        """Whole or not at all."""
        stamps = {path: path.stat().st_mtime_ns for path in sorted(self.work.glob("*.json"))}
        if stamps != self._stamps:
            parts = map(record.read, stamps)
            own = [part for part in parts if record.commit() in (None, part.get("commit"))]
            record.write(self.path, {"parts": own})
            self._stamps = stamps


def check_host(jobs: Sequence[Job], options: argparse.Namespace) -> None:
    """Before anything is started.

    Raises:
        SystemExit: fewer GPUs than asked for, or no shape file of a job.
    """
    import torch

    there = torch.cuda.device_count()
    if not options.dry_run and there < options.gpus:
        raise SystemExit(f"expected {options.gpus} GPUs (--gpus), got {there}")
    names = {WORKLOADS[job.workload].shapes for job in jobs}
    missing = sorted(name for name in names if not (options.shapes / f"{name}.jsonl.gz").is_file())
    if missing:
        raise SystemExit(
            f"expected {', '.join(f'{name}.jsonl.gz' for name in missing)} in {options.shapes} (--shapes)"
        )


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Inside, no other call writes there.

    Raises:
        SystemExit: another one does.
    """
    with (folder / "call.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SystemExit(f"expected a folder of its own for each call, got {folder}: another call runs") from None
        yield


def main(options: argparse.Namespace) -> None:
    """Runs the jobs of a call, alone in its folders."""
    begun = time.monotonic()
    jobs = list(map(Job.parse, options.jobs)) or jobs_for(options.gpus)
    for job in jobs:
        if job.processes > options.gpus:
            raise SystemExit(f"expected jobs of at most {options.gpus} processes, got {job.name}")
    options.what = "ranks"
    runs.prepare(options)
    check_host(jobs, options)
    with alone_in(options.work), alone_in(options.out):
        run(jobs, options, begun)


def run(jobs: list[Job], options: argparse.Namespace, begun: float) -> None:
    """Runs the jobs that the time allows; a job that an earlier call of this commit has done is not done again."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that processes that were started end, too
    if record.commit() is None:
        print("HARTS_COMMIT is not set: whatever earlier calls have left is done again", flush=True)
    bundle = Bundle(options.work, options.out / "ranks_jobs.json")
    if options.earlier:
        bundle.unpack(options.earlier)
    bundle.save()
    environment = runs.variables(options)
    exact = {}  # what was tuned for bfloat16 does not fit
    if options.site:
        exact["FLA_CONFIG_DIR"] = site.fla_defaults(options.site / "fla_h200", options.work / "fla-few-stages", 1)
    logs, end, wrong, cold = options.work / "logs", begun + options.seconds, {}, COLD
    left = [job for job in jobs if not record.is_done(options.work / f"{job.name}.json")]
    for wave in waves_of(left, options.gpus):
        least = max(job.seconds for job in wave) / LIMIT_FACTOR
        if end - time.monotonic() <= max(processes.SHORTEST, 0.0 if options.dry_run else least):
            continue
        started = []
        for place, job in enumerate(wave):
            first = sum(one.processes for one in wave[:place])
            devices = ",".join(str(first + rank) for rank in range(job.processes))
            variables = {"CUDA_VISIBLE_DEVICES": devices, **(exact if job.is_exact else {})}
            limit = DRY_SECONDS if options.dry_run else LIMIT_FACTOR * job.seconds + cold
            result = options.work / f"{job.name}.json"
            module, arguments = command_of(job, options, result)
            started.append(processes.Job(job.name, "ranks", limit, arguments, (result,), variables, module))
        if wave[0].kind == "kill":
            wrong |= kill(wave[0], started[0], logs, environment, end)
        else:
            at_once = 1 if options.dry_run else len(wave)
            wrong |= processes.run_jobs(started, at_once, end, logs, environment, bundle.save)
        cold = 0.0
        bundle.save()
        for job in wave:
            left.remove(job)
            print(f"{time.monotonic() - begun:5.0f} s  {job.name}: {wrong.get(job.name, 'done')}", flush=True)
            if job.name in wrong and (log := logs / f"{job.name}.log").exists():
                print(log.read_text(errors="replace")[-SHOWN:], flush=True)
        texts = {path.name: path.read_text(errors="replace")[-20_000:] for path in sorted(logs.glob("*.log"))}
        (options.out / "ranks.log").write_text("\n".join(f"-- {name}\n{text}" for name, text in texts.items()))
    print(f"{time.monotonic() - begun:.0f} s; killed or failed: {wrong}", flush=True)
    print(f"left for a later call: {', '.join(job.name for job in left) or 'nothing'}", flush=True)
    if options.site:
        site.pack_cache(options.out)
    if wrong:
        raise SystemExit(1)


def kill(
    job: Job, started: processes.Job, logs: Path, environment: Mapping[str, str], end: float
) -> dict[str, str]:  # fmt: skip
    """Writes what :func:`killed` finds, unless the time was over before it came to a kill; what went wrong."""
    found = killed(job, started, logs, environment, end)
    if found["seconds"] is None and found["returncode"] is None:
        return {job.name: "ended before a process was killed"}
    record.write(started.results[0], found)
    failures: dict[str, str] = found["failures"]
    return failures


def killed(job: Job, started: processes.Job, logs: Path, environment: Mapping[str, str], end: float) -> dict[str, Any]:
    """Starts a job one of whose processes kills itself, and waits for the launcher; whether all ended, with an error.

    Returns:
        ``seconds`` from the kill to the launcher's end, its ``returncode``, processes that were ``left`` then, and
        ``passed``.
    """
    result = Path(started.results[0])
    mark = result.with_suffix(".killed")
    mark.unlink(missing_ok=True)
    launcher = started.start(logs, environment)
    limit = min(end, time.monotonic() + started.seconds)
    try:
        while launcher.poll() is None and time.monotonic() < limit:
            if mark.exists() and time.time() - _read_time(mark) > KILL_LIMIT:
                break
            time.sleep(0.2)
        ended = time.time()
        code = launcher.poll()
    finally:
        left = _end_all(launcher, result)
    seconds = ended - _read_time(mark) if mark.exists() else None
    log = (logs / f"{started.name}.log").read_text(errors="replace")
    said = [line for line in log.splitlines() if "SIGKILL" in line or "Signal 9" in line]
    found = {
        "job": job.name, "kind": job.kind, "backend": job.backend, "processes": job.processes,
        "commit": record.commit(), "seconds": seconds, "returncode": code, "left": left,
        "said": said[-1].strip()[-300:] if said else "",
    }  # fmt: skip
    mark.unlink(missing_ok=True)
    passed = seconds is not None and code not in (None, 0) and not left and bool(said)
    return {**found, "passed": passed, "failures": {} if passed else {job.name: "see above"}}


def _read_time(mark: Path) -> float:
    text = mark.read_text()
    return float(text) if text else time.time()


def _end_all(launcher: subprocess.Popen, result: Path) -> int:
    """How many processes of the job were there yet, which are ended: each rank's has written its id."""
    marks = list(result.parent.glob(f"{result.stem}.*.pid"))
    running = [int(mark.read_text()) for mark in marks if is_worker(int(mark.read_text()))]
    for mark in marks:
        mark.unlink()
    if launcher.poll() is None:
        running.append(launcher.pid)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    launcher.wait()
    return len(running)


def is_worker(pid: int) -> bool:
    """Whether a process runs and is one of a job's: ids are given out again."""
    try:
        return b"benchmarks.ranks" in Path(f"/proc/{pid}/cmdline").read_bytes()  # empty where it has ended
    except OSError:
        return False
