"""The whole model on one GPU: parity, training, speed, memory and costs, family by family.

    python whole.py OUT.json SHAPES_FOLDER [--budget SECONDS] [--families F ...] [--stages check time] [--dry-run]

Run in this folder with the project's root and its ``tests`` on PYTHONPATH. Two stages, each family in a process of its
own: ``check`` (all families side by side: `harts verify`, three steps of TreeGRPOTrainer, two runs bit by bit), then
``time`` (one after the other: update time on real shapes against the same kernels without sharing, memory of windows,
`harts bench --fit-cost`). OUT.json is written anew after every part of every family, so that what is there survives
what is not. No speed is reported of a family whose verdict is not PASS. ``--dry-run``: tiny models on the CPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
PARTS = {"check": ("verify", "train", "repeat", "verify_float32"), "time": ("speed", "memory", "cost")}
LIMITS = {"check": 240, "time": 110}  # seconds of a process
# Parts that need not be run for every family; the others are.
ONLY = {
    "memory": ("bailing_hybrid", "qwen3_5_text"),
    "cost": ("bailing_hybrid", "qwen3_5_text"),
    "repeat": ("qwen3_5_text", "olmo_hybrid"),  # dense: what Transformers' experts do is not ours
    "verify_float32": ("bailing_hybrid", "qwen3_5_text"),  # attention at 192/128 and 256 without FA4
}


def start(family: str, stage: str, folder: Path, arguments: argparse.Namespace) -> subprocess.Popen:
    """A process for a stage of a family, whose log is kept."""
    command = [sys.executable, str(HERE / "whole_parts.py"), family, stage, str(folder), str(arguments.shapes)]
    with (folder / f"{family}-{stage}.log").open("w") as log:
        return subprocess.Popen([*command, *(["--dry-run"] if arguments.dry_run else [])], stdout=log, stderr=log)


def wait(processes: dict[str, subprocess.Popen], seconds: float, save) -> None:
    """Until all have ended, or for so long; the rest are killed. Saves every second."""
    end = time.monotonic() + seconds
    while any(process.poll() is None for process in processes.values()) and time.monotonic() < end:
        time.sleep(1)
        save()
    for process in processes.values():
        if process.poll() is None:
            process.kill()
            process.wait()
    save()


def merge(folder: Path, families: list[str], killed: dict[str, str]) -> dict:
    """What all processes have written; the speed of a family only beside its passed verdict."""
    result: dict = {"rows": [], "failures": {}, "killed": killed}
    for family in families:
        found = {}
        for part in (part for parts in PARTS.values() for part in parts):
            path = folder / f"{family}-{part}.json"
            if path.exists():
                found[part] = json.loads(path.read_text())
        verdicts = found.get("verify", {}), found.get("verify_float32", {"passed": True})  # not every family's
        passed = all(verdict.get("passed") for verdict in verdicts)
        for part, entry in found.items():
            result |= {key: entry.pop(key) for key in ("device", "versions", "commit", "seed") if key in entry}
            if "failure" in entry:
                result["failures"][f"{family} {part}"] = entry["failure"]
            elif part == "speed" and not passed:
                result["failures"][f"{family} speed"] = "not reported: a verdict of harts verify is not PASS"
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
    arguments.folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    begin, killed = time.monotonic(), {}
    if arguments.dry_run:  # few and slow cores
        LIMITS.update({stage: 8 * limit for stage, limit in LIMITS.items()})

    def save() -> None:
        text = json.dumps(merge(arguments.folder, list(CONFIGS), killed), indent=1)
        arguments.out.write_text(text + "\n")

    together = {
        family: start(family, "check", arguments.folder, arguments)
        for family in families
        if "check" in arguments.stages
    }
    wait(together, min(LIMITS["check"], arguments.budget), save)
    killed |= {f"{f} check": f"exit {p.returncode}" for f, p in together.items() if p.returncode}
    for family in families if "time" in arguments.stages else ():
        left = arguments.budget - (time.monotonic() - begin)
        if left < 20:
            killed[f"{family} time"] = "not begun: no time left"
            continue
        process = start(family, "time", arguments.folder, arguments)
        wait({family: process}, min(LIMITS["time"], left), save)
        if process.returncode:
            killed[f"{family} time"] = f"exit {process.returncode}"
    save()
    for log in sorted(arguments.folder.glob("*.log")):
        print(f"-- {log.name}\n{log.read_text()[-400:]}")
    print(f"{time.monotonic() - begin:.0f} s; killed or failed: {killed}", flush=True)


if __name__ == "__main__":
    main()
