"""A call: jobs one after another on one host, each in processes of its own within a time limit."""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu import processes, record, runs, site
from benchmarks.ranks.jobs import Job

LIMIT_FACTOR = 2.0  # of what a job is thought to take
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


def main(options: argparse.Namespace) -> None:
    """Runs the jobs that the time allows; a job that an earlier call of this commit has done is not done again."""
    begun = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that processes that were started end, too
    jobs = list(map(Job.parse, options.jobs))
    for job in jobs:
        if job.processes > options.gpus:
            raise SystemExit(f"expected jobs of at most {options.gpus} processes, got {job.name}")
    options.what = "ranks"
    runs.prepare(options)
    environment = runs.variables(options)
    if options.site:
        few_stages = site.fla_defaults(options.site / "fla_h200", options.work / "fla-few-stages", 1)
    logs, end, wrong = options.work / "logs", begun + options.seconds, {}
    for job in jobs:
        name, result = job.name, options.out / f"{job.name}.json"
        limit = DRY_SECONDS if options.dry_run else LIMIT_FACTOR * job.seconds
        variables = {"CUDA_VISIBLE_DEVICES": "0"} if job.backend == "one" else {}
        if job.is_exact and options.site:  # what was tuned for bfloat16 does not fit
            variables["FLA_CONFIG_DIR"] = few_stages
        module, arguments = command_of(job, options, result)
        started = processes.Job(name, "ranks", limit, arguments, (result,), variables, module)
        if job.kind == "kill":
            if end - time.monotonic() > processes.SHORTEST and not started.is_done():
                found = killed(job, started, logs, environment, end)
                record.write(result, found)
                wrong |= found["failures"]
        else:
            wrong |= processes.run_jobs([started], 1, end, logs, environment, lambda: None)
        print(f"{time.monotonic() - begun:5.0f} s  {name}: {wrong.get(name, 'done')}", flush=True)
    texts = [f"-- {path.name}\n{path.read_text(errors='replace')[-20_000:]}" for path in sorted(logs.glob("*.log"))]
    (options.out / "ranks.log").write_text("\n".join(texts))
    print(f"{time.monotonic() - begun:.0f} s; not begun, killed or failed: {wrong}", flush=True)
    if options.site:
        site.pack_cache(options.out)
    if wrong:
        raise SystemExit(1)


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
