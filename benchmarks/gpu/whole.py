"""The whole model on one GPU: parity, training, speed, memory and costs, family by family.

    python whole.py OUT.json SHAPES_FOLDER [--budget SECONDS] [--families F ...] [--stages STAGE ...] [--dry-run]

Run in this folder with the project's root and its ``tests`` on PYTHONPATH. Stages, each of a family in a process of
its own: ``check`` (`harts verify` in bf16, three steps of TreeGRPOTrainer), ``float32`` (`harts verify` in float32)
and ``repeat`` (two runs bit by bit), side by side; then ``time`` (one after the other: update time on real shapes
against the same kernels without sharing, memory of windows, `harts bench --fit-cost`). OUT.json is written anew after
every part of every family, so that what is there survives what is not; what the folder has of earlier runs is not done
again. No speed is reported of a family whose verdicts are not PASS. ``--dry-run``: tiny models on the CPU.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
PARTS = {
    "check": ("verify", "train"),
    "float32": ("verify_float32",),
    "repeat": ("repeat",),
    "time": ("speed", "memory", "cost"),
}
LIMITS = {"check": 240, "float32": 240, "repeat": 120, "time": 110}  # seconds of a process
SIDE_BY_SIDE = 4  # processes: each takes 20 to 30 GB of the GPU, for float64 among others, kimi_linear 47
# Parts that need not be run for every family; the others are.
ONLY = {
    "memory": ("bailing_hybrid", "qwen3_5_text"),
    "cost": ("bailing_hybrid", "qwen3_5_text"),
    "repeat": ("qwen3_5_text", "olmo_hybrid"),  # dense: what Transformers' experts do is not ours
    "verify_float32": ("bailing_hybrid", "qwen3_5_text"),  # attention at 192/128 and 256 without FA4
}
# Where FLA's configurations for heads of 128 in bf16 do not fit the GPU.
OTHER_CONFIGURATIONS = {
    *(("olmo_hybrid", stage) for stage in PARTS),
    *((family, "float32") for family in ONLY["verify_float32"]),
}


def parts_of(family: str, stage: str) -> list[str]:
    return [part for part in PARTS[stage] if family in ONLY.get(part, (family,))]


def is_done(folder: Path, family: str, stage: str) -> bool:
    """Whether an earlier run of this commit (HARTS_COMMIT) has written all parts of a stage, and none failed."""
    commit = os.environ.get("HARTS_COMMIT")
    for part in parts_of(family, stage):
        path = folder / f"{family}-{part}.json"
        found = json.loads(path.read_text()) if path.exists() else {"failure": "not there"}
        if "failure" in found or not found.get("passed", True) or commit is None or found.get("commit") != commit:
            return False
    return True


def start(family: str, stage: str, arguments: argparse.Namespace) -> subprocess.Popen:
    """A process for a stage of a family, whose log is kept."""
    command = [sys.executable, str(HERE / "whole_parts.py"), family, stage, arguments.folder, arguments.shapes]
    environment = dict(os.environ)
    if (family, stage) in OTHER_CONFIGURATIONS and "FLA_CONFIG_DIR_FEW_STAGES" in environment:
        environment["FLA_CONFIG_DIR"] = environment["FLA_CONFIG_DIR_FEW_STAGES"]
    with (arguments.folder / f"{family}-{stage}.log").open("w") as log:
        options = ["--dry-run"] if arguments.dry_run else []
        command = [*map(str, command), *options]
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)


def run(jobs: list[tuple[str, str]], at_once: int, end: float, arguments: argparse.Namespace, save) -> dict[str, str]:
    """Stages of families, ``at_once`` side by side, each until its limit or ``end``. Saves every second.

    Returns:
        What was not begun, was killed or failed.
    """
    waiting, running, wrong = list(jobs), {}, {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once and end - time.monotonic() > 20:
                job = waiting.pop(0)
                running[job] = start(*job, arguments), min(time.monotonic() + LIMITS[job[1]], end)
            if not running:
                return wrong | {" ".join(job): "not begun: no time left" for job in waiting}
            time.sleep(1)
            for job, (process, limit) in list(running.items()):
                if process.poll() is None and time.monotonic() > limit:
                    process.send_signal(signal.SIGUSR1)  # its stacks go to the log
                    time.sleep(1)
                    kill(process)
                if process.poll() is not None:
                    del running[job]
                    if process.returncode:
                        wrong[" ".join(job)] = f"exit {process.returncode}"
            save()
        return wrong
    finally:
        for process, _ in running.values():
            kill(process)


def kill(process: subprocess.Popen) -> None:
    """With the compilers that it has begun."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def merge(folder: Path, families: list[str], killed: dict[str, str]) -> dict:
    """What all processes have written; the speed of a family only beside its passed verdict."""
    result: dict = {"rows": [], "failures": {}, "killed": killed}
    for family in families:
        found = {}
        for part in (part for parts in PARTS.values() for part in parts):
            path = folder / f"{family}-{part}.json"
            if path.exists():
                found[part] = json.loads(path.read_text())
        verdicts = [found.get(part, {}) for part in ("verify", *parts_of(family, "float32"))]
        commits = {entry.get("commit") for entry in [*verdicts, *filter(None, [found.get("speed")])]}
        passed = all(verdict.get("passed") for verdict in verdicts) and len(commits) == 1
        for part, entry in found.items():
            result |= {key: entry.pop(key) for key in ("device", "versions", "seed") if key in entry}
            if "failure" in entry:
                result["failures"][f"{family} {part}"] = entry["failure"]
            elif part == "speed" and not passed:
                result["failures"][f"{family} speed"] = "not reported: not every verdict of this commit is PASS"
            else:
                result["rows"].append({"op": part, "family": family, **entry})
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("shapes", type=Path)
    parser.add_argument("--budget", type=float, default=480, help="seconds for everything")
    parser.add_argument("--families", nargs="+")
    parser.add_argument("--stages", nargs="+", choices=PARTS, default=list(PARTS), help="another run may do the rest")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "harts_whole", help="of logs and parts"
    )
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    from whole_models import CONFIGS

    families = arguments.families or list(CONFIGS)  # of this run; OUT.json holds all that the folder has
    if arguments.dry_run:
        arguments.folder /= "dry"
    arguments.folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that processes that were started end, too
    if "HARTS_COMMIT" not in os.environ:
        print("HARTS_COMMIT is not set: whatever earlier runs have left in the folder is done again", flush=True)
    begin, killed = time.monotonic(), {}
    if arguments.dry_run:  # few and slow cores
        LIMITS.update({stage: 8 * limit for stage, limit in LIMITS.items()})

    def save() -> None:
        text = json.dumps(merge(arguments.folder, list(CONFIGS), killed), indent=1)
        for folder in (arguments.folder, arguments.shapes):  # of this machine, in what the commands say they read
            text = text.replace(f"{folder}/", "")
        arguments.out.write_text(text + "\n")

    end = begin + arguments.budget
    for stages, at_once in ((("check", "float32", "repeat"), SIDE_BY_SIDE), (("time",), 1)):
        jobs = [
            (family, stage)
            for stage in stages
            if stage in arguments.stages
            for family in families
            if not is_done(arguments.folder, family, stage)
        ]
        killed |= run(jobs, at_once, end, arguments, save)
    save()
    for log in sorted(arguments.folder.glob("*.log")):
        print(f"-- {log.name}\n{log.read_text()[-400:]}")
    print(f"{time.monotonic() - begin:.0f} s; killed or failed: {killed}", flush=True)


if __name__ == "__main__":
    main()
