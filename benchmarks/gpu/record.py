"""Result files: device, versions, commit and seed in each; rows that are added one by one; merged into the record."""

import argparse
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
    for package in ("triton", "fla-core", "flash-attn-4", "transformers"):
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


def collect_kernels(parity: dict, parts: list[dict]) -> dict:
    """One result of several runs; each row keeps the commit that it was measured at."""
    ops = ["attention" if "parity" in part else "linear" for part in parts]
    return {
        "device": parts[0]["device"],
        "versions": {op: part["versions"] for op, part in zip(ops, parts, strict=True)},
        "commit": parts[-1]["commit"],
        "seed": parts[0]["seed"],
        "rows": [{**row, "commit": part["commit"]} for part in parts for row in part["rows"]],
        "launches_by_branches": {key: value for part in parts for key, value in part.get("launches", {}).items()},
        "failures": {key: value for part in parts for key, value in part["failures"].items()},
        "parity": {
            "linear": parity,
            "attention": {key: value for part in parts for key, value in part.get("parity", {}).items()},
        },
    }


def extend_kernels(old: dict, new: dict) -> dict:
    """``new`` with what only ``old`` has; of rows, the new one where both have it."""
    merged = {**old, **new, "rows": _extended(old, new, lambda row: (row["op"], cell(row)))}
    for name in ("versions", "launches_by_branches"):
        merged[name] = {**old[name], **new[name]}
    merged["parity"] = {
        "linear": new["parity"]["linear"],
        "attention": {**old["parity"]["attention"], **new["parity"]["attention"]},
    }
    return merged


def extend_whole(old: dict, new: dict) -> dict:
    """``new`` with the rows that only ``old`` has."""
    return {**old, **new, "rows": _extended(old, new, lambda row: (row["op"], row["family"]))}


def _extended(old: dict, new: dict, key: Callable[[dict], tuple]) -> list[dict]:
    """The old rows, each in its order and as measured anew where it was, then new ones."""
    measured = {key(row): row for row in new["rows"]}
    return [measured.pop(key(row), row) for row in old["rows"]] + list(measured.values())


def main(options: argparse.Namespace) -> None:
    """Merges result files into the record and draws it; refuses where a parity check fails."""
    from benchmarks.gpu import draw, gates

    result = read(options.record) if options.record.exists() else None
    if options.what == "kernels":
        parts = [read(part) for part in options.parts]
        if not options.parity and not (result and all("parity" in part for part in parts)):
            raise SystemExit("rows of linear attention need --parity, the checks beside them: nothing is reported")
        if parts:
            parity = read(options.parity) if options.parity else result["parity"]["linear"]
            new = collect_kernels(parity, parts)
            result = extend_kernels(result, new) if result else new
        check, picture = gates.check_kernels, draw.kernels
    else:
        for new in (read(part) for part in options.parts):
            result = extend_whole(result, new) if result else new
        check, picture = gates.check_whole, draw.whole
    if result is None:
        raise SystemExit(f"expected {options.record} or files to make it of, got neither")
    check(result)
    write(options.record, result)
    picture(result, options.record.with_suffix(".png"))
    for op in dict.fromkeys(row["op"] for row in result["rows"] if "efficiency" in row):
        values = [row["efficiency"] for row in result["rows"] if row["op"] == op]
        print(f"{op}: {len(values)} rows, efficiency {min(values):.3f} to {max(values):.3f}")
