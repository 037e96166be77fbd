"""Merges what the GPU benchmarks wrote into one result file and draws it.

    python collect.py PARITY.json OUT.json LINEAR.json ... ATTENTION.json

Rows that OUT.json holds already stay unless they are measured anew.
Refuses where a parity check fails: rows of linear attention need the linear check, rows of attention their head dim's.
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from measure import errors_of, within_limits

BARS = {"linear": 0.92, "attention 128": 0.95, "attention 192/128": 0.95, "attention 256": 0.89}


def collect(parity: dict, parts: list[dict]) -> dict:
    """One result of several runs; each row keeps the commit that it was measured at."""
    rows, launches, attention, failures = [], {}, {}, {}
    by_op: dict[str, dict] = {}
    for part in parts:
        attention |= part.get("parity", {})
        launches |= part.get("launches", {})
        failures |= part["failures"]
        by_op["attention" if "parity" in part else "linear"] = part["versions"]
        rows += [{**row, "commit": part["commit"]} for row in part["rows"]]
    return {
        "device": parts[0]["device"],
        "versions": by_op,
        "commit": parts[-1]["commit"],
        "seed": parts[0]["seed"],
        "rows": rows,
        "launches_by_branches": launches,
        "failures": failures,
        "parity": {"linear": parity, "attention": attention},
    }


def check(result: dict) -> None:
    """Ends the process where a parity check beside any row failed, be the row measured now or before."""
    rows, parity = result["rows"], result["parity"]
    if any(row["op"] != "attention" for row in rows) and not parity["linear"]["passes"]:
        raise SystemExit("the parity check of linear attention failed: nothing is reported")
    for name in sorted({row["head_dim"] for row in rows if row["op"] == "attention"}):
        if not within_limits(errors_of(parity["attention"][name])):
            raise SystemExit(f"the parity check of attention at head dim {name} failed: nothing is reported")


def onto(old: dict, new: dict) -> dict:
    """``new`` with what only ``old`` has; of rows, the new one where both have it."""

    def key(row: dict) -> tuple:
        return row["op"], row["layout"], row.get("kind") or row["head_dim"]

    measured = {key(row) for row in new["rows"]}
    merged = {**old, **new}
    merged["rows"] = [row for row in old["rows"] if key(row) not in measured] + new["rows"]
    for name in ("versions", "launches_by_branches"):
        merged[name] = {**old[name], **new[name]}
    merged["parity"] = {
        "linear": new["parity"]["linear"],
        "attention": {**old["parity"]["attention"], **new["parity"]["attention"]},
    }
    return merged


def draw(result: dict, path: Path) -> None:
    """Efficiency of every row: one panel for linear layers, one for attention."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 6), gridspec_kw={"width_ratios": [3, 1.3]})
    linear = [row for row in result["rows"] if row["op"] == "linear"]
    layouts = list(dict.fromkeys(row["layout"] for row in linear))
    for kind in dict.fromkeys(row["kind"] for row in linear):
        points = [(layouts.index(row["layout"]), row["efficiency"]) for row in linear if row["kind"] == kind]
        left.plot(*zip(*points, strict=True), "o", label=kind)
    left.axhline(BARS["linear"], color="grey", linewidth=1, linestyle="--", label="bar 0.92")
    left.set_xticks(range(len(layouts)), layouts, rotation=90, fontsize=7)
    left.set(title="linear layer, forward + backward", ylabel="efficiency (ideal by stages / measured)")
    attention = [row for row in result["rows"] if row["op"] == "attention"]
    shapes = list(dict.fromkeys(row["layout"] for row in attention))
    for color, name in enumerate(dict.fromkeys(row["head_dim"] for row in attention)):
        points = [(shapes.index(row["layout"]), row["efficiency"]) for row in attention if row["head_dim"] == name]
        right.plot(*zip(*points, strict=True), "o", color=f"C{color}", label=f"head dims {name}")
        right.axhline(BARS[f"attention {name}"], color=f"C{color}", linewidth=1, linestyle="--")
    right.set_xticks(range(len(shapes)), shapes, rotation=90, fontsize=7)
    right.set(title="attention, forward + backward", ylabel="speedup / ratio of pairs (prefix) or tiles")
    for axes in (left, right):
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    figure.suptitle(f"{result['device']}, bf16, against stock FLA and FA4 varlen on expanded trajectories")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parity, out, *parts = map(Path, sys.argv[1:])
    result = collect(json.loads(parity.read_text()), [json.loads(part.read_text()) for part in parts])
    if out.exists():
        result = onto(json.loads(out.read_text()), result)
    check(result)
    out.write_text(json.dumps(result, indent=1) + "\n")
    draw(result, out.with_suffix(".png"))
    for op in ("linear", "conv", "attention"):
        values = [row["efficiency"] for row in result["rows"] if row["op"] == op]
        print(f"{op}: {len(values)} rows, efficiency {min(values):.3f} to {max(values):.3f}")


if __name__ == "__main__":
    main()
