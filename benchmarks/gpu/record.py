"""Result files: device, versions, commit and seed in each; rows that are added one by one."""

import importlib.metadata
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.registry import SEED

RESULTS = Path(__file__).parents[1] / "results"
ABOUT = ("device", "versions", "commit", "seed")


def commit() -> str | None:
    """Of the code that is measured: a GPU host has no repository."""
    return os.environ.get("HARTS_COMMIT")


def about() -> dict[str, Any]:
    """Device, versions, commit and seed for a result file."""
    import torch

    versions = {"torch": torch.__version__}
    for package in ("triton", "fla-core", "flash-attn-4", "transformers", "accelerate", "trl", "deepspeed"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu (dry run)"
    return {"device": device, "versions": versions, "commit": commit() or "unknown", "seed": SEED}


def failure() -> str:
    """The exception that is being handled, for a result file; its stack, with a machine's paths, goes to the log."""
    traceback.print_exc(file=sys.stdout)
    sys.stdout.flush()
    return "".join(traceback.format_exception_only(sys.exc_info()[1])).strip()[-1000:]


def read(path: Path) -> dict:
    """A result file."""
    found: dict = json.loads(path.read_text())
    return found


def parts_in(path: Path) -> list[dict]:
    """The results in a file: one, or those that a call put together."""
    found = read(path)
    parts: list[dict] = found.get("parts", [found])
    return parts


def write(path: Path, result: Any, *folders: Path) -> None:
    """A result file, whole or not at all; ``folders`` of this machine are taken out of the names in it."""
    text = json.dumps(result, indent=1)
    for folder in folders:
        text = text.replace(f"{folder}/", "")
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text + "\n")
    temporary.rename(path)


def is_done(path: Path) -> bool:
    """Whether an earlier run of this commit has written a part, without failures."""
    found = read(path) if path.exists() else {}
    wrong = found.get("failure") or found.get("failures") or not found.get("passed", True)
    return commit() is not None and found.get("commit") == commit() and not wrong


def cell(row: dict) -> str:
    """What of an operation a row is of, on which layout."""
    return f"{row.get('kind') or row['head_dim']} {row['layout']}"


class Rows:
    """Timed rows that are written one by one; those of an earlier run of this commit are not measured again.

    Args:
        path: the result file.
        content: of it, beside rows.

    Attributes:
        result: what the file holds.
        earlier: what it held, if it is of this commit.
    """

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self.path = path
        self.earlier = read(path) if path.exists() and commit() is not None else {}
        if self.earlier.get("commit") != commit():
            self.earlier = {}
        self.result = {**about(), "failures": {}, **content, "rows": self.earlier.get("rows", [])}
        self.save()

    def add(self, label: str, measure: Callable[[], list[dict]]) -> None:
        """Measures a cell unless it is there; an exception costs this cell alone."""
        import torch

        if label in map(cell, self.result["rows"]):
            return
        try:
            self.result["rows"] += measure()
        except Exception:
            self.result["failures"][label] = failure()
        torch.cuda.empty_cache()
        self.save()

    def save(self) -> None:
        """Writes all that there is."""
        write(self.path, self.result)
