"""What a result was measured on, and where it is written; for all CPU benchmarks."""

import argparse
import os
import platform
import subprocess
from pathlib import Path

import numpy as np

RESULTS = Path(__file__).parent / "results"


def describe_machine() -> dict[str, object]:
    """What the numbers were measured on."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "cpu_cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "commit": commit.stdout.strip(),
    }


def output_path(name: str, description: str | None) -> Path:
    """Of a benchmark without other options: ``--out``, or ``results/<name>.json``; its folder is there afterwards."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json", help="(default: %(default)s)")
    path: Path = parser.parse_args().out
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
