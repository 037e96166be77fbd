"""Whole runs on one GPU: checks side by side, then times alone, each in a process within a time limit.

What a run of the same commit (HARTS_COMMIT) has left in its ``--work`` folder and OUT is not done again: a run that
time cut short goes on when it is called again.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu import gates, record, site
from benchmarks.gpu.processes import Job, run_jobs
from benchmarks.gpu.registry import (
    FIRST_LAYOUTS,
    FLASH_VARIANTS,
    FLEX_DTYPES,
    HEAD_DIMS,
    LINEAR_CHECKS,
    LINEAR_KINDS,
    OTHER_CONFIGURATIONS,
    WHOLE_PARTS,
    parts_of,
)  # fmt: skip

WHOLE_LIMITS = {"check": 240, "float32": 240, "repeat": 120, "time": 150}  # seconds of a process
WHOLE_AT_ONCE = 4  # processes: each takes 20 to 30 GB of the GPU, for float64 among others, kimi_linear 47
DRY_SLOWNESS = 8  # few and slow cores


class Phase(NamedTuple):
    """Jobs, how many of them run side by side, and what is written every second meanwhile and at the end."""

    jobs: list[Job]
    at_once: int
    save: Callable[[], None] = lambda: None


def linear(options: argparse.Namespace, wrong: dict[str, str]) -> Iterator[Phase]:
    """Kernels are compiled while the checks run; then layers are timed, the first layouts of all kinds first."""

    def timing(layouts: tuple[str, ...]) -> Job:
        return Job(
            f"time-{len(layouts)}-layouts", "time", options.seconds,
            ("time", "linear", "--parity", parity, "--shapes", options.shapes, "--out", options.out / "linear.json",
             "--kinds", *options.kinds, "--layouts", *layouts),
        )  # fmt: skip

    parts = {name: options.work / f"{name}.json" for name in LINEAR_CHECKS}
    checks = [
        Job(f"parity-{name}", "parity", 200, ("parity", "linear", name, "--out", part), (part,))
        for name, part in parts.items()
    ]
    if not all(job.is_done() for job in checks):
        warm = [Job(f"warm-{kind[:6]}", "parity", 150, ("warm", "linear", kind)) for kind in LINEAR_KINDS]
        yield Phase(warm + checks, len(warm + checks))
    parity, found = options.out / "parity.json", gates.merge_linear(list(parts.values()))
    record.write(parity, found)
    print("parity of linear attention passes:", found["passes"], flush=True)
    site.forget_tuning()
    chosen = tuple(options.layouts)
    first = tuple(name for name in chosen if name in FIRST_LAYOUTS)
    yield Phase([timing(layouts) for layouts in dict.fromkeys((first, chosen)) if layouts], 1)


def attention(options: argparse.Namespace, wrong: dict[str, str]) -> Iterator[Phase]:
    """The package's call, its variants and FlexAttention are checked side by side; then the first two are timed."""
    calls = [
        *((dim,) for dim in HEAD_DIMS),
        *((dim, "--variant", variant) for variant, dims in FLASH_VARIANTS.items() for dim in dims),
        *((dim, "--flex", dtype) for dim in HEAD_DIMS for dtype in FLEX_DTYPES),
    ]
    checks = []
    for call in calls:
        name = "".join(call).replace("/", "_")
        part = options.work / f"{name}.json"
        checks.append(Job(f"parity-{name}", "parity", 110, ("parity", "attention", *call, "--out", part), (part,)))
    yield Phase(checks, len(checks))
    parts = [path for job in checks for path in job.results]
    arguments = ("--parity", *parts, "--shapes", options.shapes, "--out", options.out / "attention.json")
    yield Phase([Job("time", "time", options.seconds, ("time", "attention", *arguments))], 1)


def whole(options: argparse.Namespace, wrong: dict[str, str]) -> Iterator[Phase]:
    """Verdicts, a training and repeated runs side by side, the suite's tests of a GPU beside them; then times."""
    folders = ("--folder", options.work, "--shapes", options.shapes, *(["--dry-run"] if options.dry_run else []))
    few_stages = {}
    if options.site:
        few_stages["FLA_CONFIG_DIR"] = site.fla_defaults(options.site / "fla_h200", options.work / "fla-few-stages", 1)

    def job(family: str, stage: str) -> Job:
        seconds = WHOLE_LIMITS[stage] * (DRY_SLOWNESS if options.dry_run else 1)
        results = tuple(options.work / f"{family}-{part}.json" for part in parts_of(family, stage))
        variables = few_stages if (family, stage) in OTHER_CONFIGURATIONS else {}
        return Job(f"{family}-{stage}", stage, seconds, ("stage", stage, family, *folders), results, variables)

    def save() -> None:
        record.write(options.out / "whole.json", gates.merge_whole(options.work, wrong), options.work, options.shapes)

    arguments = ("-m", "gpu", "-q", "--disable-warnings", "tests/ops", "-p", "no:cacheprovider")
    tests = Job("tests", "tests", 60, arguments, module="pytest")
    checks = [
        job(family, stage) for stage in WHOLE_PARTS for family in options.families
        if stage != "time" and parts_of(family, stage)
    ]  # fmt: skip
    yield Phase([tests, *checks], WHOLE_AT_ONCE + 1, save)
    yield Phase([job(family, "time") for family in options.families], 1, save)  # nothing else runs meanwhile


def variables(options: argparse.Namespace) -> dict[str, str]:
    """The environment of all jobs."""
    found = site.environment(options.site)
    tuned = options.site / "fla_h200" if options.site else None
    if options.what != "linear":
        found |= {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}
    elif tuned:
        found |= {"FLA_CONFIG_DIR": str(tuned), "FLA_CACHE_MODE": "fuzzy"}
    if options.what in ("whole", "ranks"):
        found = {"OMP_NUM_THREADS": "2", **found, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if tuned:
            found |= {"FLA_CONFIG_DIR": site.fla_defaults(tuned, options.work / "fla"), "FLA_CACHE_MODE": "full"}
    return found


def prepare(options: argparse.Namespace) -> None:
    """Folders: absolute, those that are written there."""
    if not (options.shapes or options.site):
        raise SystemExit("expected --site or --shapes, got neither")
    dry = "_dry" if getattr(options, "dry_run", False) else ""
    options.site = options.site.resolve() if options.site else None
    options.shapes = (options.shapes or options.site / "shapes").resolve()
    options.work = (options.work or Path(tempfile.gettempdir()) / f"harts_{options.what}{dry}").resolve()
    options.out = options.out.resolve()
    for folder in (options.work / "logs", options.out):
        folder.mkdir(parents=True, exist_ok=True)


def main(options: argparse.Namespace) -> None:
    """One run: phase after phase of the stages that are asked for, until the time is over."""
    begin = time.monotonic()
    prepare(options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that processes that were started end, too
    if record.commit() is None:
        print("HARTS_COMMIT is not set: whatever earlier runs have left is done again", flush=True)
    environment, wrong = variables(options), {}
    logs = options.work / "logs"
    runs = {"linear": linear, "attention": attention, "whole": whole}
    for phase in runs[options.what](options, wrong):
        print(f"{time.monotonic() - begin:.0f} s", flush=True)
        jobs = [job for job in phase.jobs if job.stage in options.stages]
        wrong |= run_jobs(jobs, phase.at_once, begin + options.seconds, logs, environment, phase.save)
        phase.save()
    texts = [f"-- {path.name}\n{path.read_text(errors='replace')}" for path in sorted(logs.glob("*.log"))]
    (options.out / f"{options.what}.log").write_text("\n".join(texts))
    print("\n".join(f"{text.splitlines()[0]}\n{text[-400:]}" for text in texts))
    print(f"{time.monotonic() - begin:.0f} s; not begun, killed or failed: {wrong}", flush=True)
    if options.what != "attention" and options.site:
        site.pack_cache(options.out)
