"""Result files merged into the record, which is drawn and refused where a parity check fails."""

import argparse
from collections.abc import Callable
from pathlib import Path

from benchmarks.gpu import gates
from benchmarks.gpu.record import cell, read, write


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


def collect_step(part: dict) -> dict:
    """The rows of a result file as the record has them: with their machine and commit, without names of kernels."""
    kept = {"machine": part["machine"], "commit": part["commit"], "versions": part["versions"]}
    left_out = ("largest", "other", "host", "host_seconds")
    rows = [{**{k: v for k, v in row.items() if k not in left_out}, **kept} for row in part["rows"]]
    return {"device": part["device"], "seed": part["seed"], "failures": part["failures"], "rows": rows}


def extend_step(old: dict, new: dict) -> dict:
    """``new`` with the rows that only ``old`` has: those of another commit, too."""
    names = ("model", "workload", "checkpointing", "sharing", "fused_modules", "max_tokens_per_microbatch", "commit")
    some = ("old_log_probs", "rows_per_batch")
    rows = _extended(old, new, lambda row: (*(row[name] for name in names), *map(row.get, some)))
    return {**old, **new, "rows": rows}


def _extended(old: dict, new: dict, key: Callable[[dict], tuple]) -> list[dict]:
    """The old rows, each in its order and as measured anew where it was, then new ones."""
    measured = {key(row): row for row in new["rows"]}
    return [measured.pop(key(row), row) for row in old["rows"]] + list(measured.values())


def main(options: argparse.Namespace) -> None:
    """Merges result files into the record and draws it; refuses where a parity check fails."""
    from benchmarks.gpu import draw

    picture: Callable[[dict, Path], object] | None
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
    elif options.what == "step":
        for new in (collect_step(read(part)) for part in options.parts):
            result = extend_step(result, new) if result else new
        check, picture = gates.check_step, None
    else:
        for new in (read(part) for part in options.parts):
            result = extend_whole(result, new) if result else new
        check, picture = gates.check_whole, draw.whole
    if result is None:
        raise SystemExit(f"expected {options.record} or files to make it of, got neither")
    check(result)
    write(options.record, result)
    if picture is not None:
        picture(result, options.record.with_suffix(".png"))
    for op in dict.fromkeys(row["op"] for row in result["rows"] if "efficiency" in row):
        values = [row["efficiency"] for row in result["rows"] if row["op"] == op]
        print(f"{op}: {len(values)} rows, efficiency {min(values):.3f} to {max(values):.3f}")
