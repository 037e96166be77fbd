"""Draws the records."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

BARS = {"linear": 0.92, "attention 128": 0.95, "attention 192/128": 0.95, "attention 256": 0.89}


def kernels(result: dict, path: Path) -> None:
    """Efficiency of every row: one panel for linear layers, one for attention."""
    figure = Figure(figsize=(14, 6), layout="tight")
    left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": [3, 1.3]})
    for axes, op, field in ((left, "linear", "kind"), (right, "attention", "head_dim")):
        rows = [row for row in result["rows"] if row["op"] == op]
        layouts = list(dict.fromkeys(row["layout"] for row in rows))
        for color, name in enumerate(dict.fromkeys(row[field] for row in rows)):
            points = [(layouts.index(row["layout"]), row["efficiency"]) for row in rows if row[field] == name]
            label = name if op == "linear" else f"head dims {name}"
            axes.plot(*zip(*points, strict=True), "o", color=f"C{color}", label=label)
            if op == "attention":
                axes.axhline(BARS[f"attention {name}"], color=f"C{color}", linewidth=1, linestyle="--")
        axes.set_xticks(range(len(layouts)), layouts, rotation=90, fontsize=7)
    left.axhline(BARS["linear"], color="grey", linewidth=1, linestyle="--", label="bar 0.92")
    left.set(title="linear layer, forward + backward", ylabel="efficiency (ideal by stages / measured)")
    right.set(title="attention, forward + backward", ylabel="speedup / ratio of pairs (prefix) or tiles")
    for axes in (left, right):
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    figure.suptitle(f"{result['device']}, bf16, against stock FLA and FA4 varlen on expanded trajectories")
    figure.savefig(path, dpi=110)


def whole(result: dict, path: Path) -> None:
    """Speeds of whole models, and peaks of windows against their predictions."""
    speeds = [row for row in result["rows"] if row["op"] == "speed"]
    windows = [(row["family"], window) for row in result["rows"] if row["op"] == "memory" for window in row["windows"]]
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    bars = [(f"{row['family']}\n{name}", entry) for row in speeds for name, entry in row["shapes"].items()]
    positions = np.arange(len(bars))
    drawn = [
        ("speedup", "forward and backward"),
        ("speedup_with_scoring", "the package's update (scoring where there are several microbatches)"),
        ("sharing_ratio", "sharing ratio (rows)"),
    ]
    drawn = [pair for pair in drawn if any(pair[0] in entry for _, entry in bars)]
    for position, (key, label) in enumerate(drawn):
        left.bar(positions + 0.27 * (position - 1), [entry.get(key, 0) for _, entry in bars], 0.27, label=label)
    left.set_xticks(positions, [label for label, _ in bars], rotation=90, fontsize=7)
    left.set_title("against the same kernels without sharing")
    left.set_ylim(0, 1.3 * max(left.get_ylim()))
    left.legend(fontsize=7)
    for family in dict.fromkeys(family for family, _ in windows):
        ours = [window for name, window in windows if name == family and not window["fitted"]]
        right.plot(*[[w[key] / 1e9 for w in ours] for key in ("peak_bytes", "predicted_bytes")], "x", label=family)
    if windows:
        ends = np.array(right.get_xlim())
        for factor in (0.9, 1.0, 1.1):
            right.plot(ends, factor * ends, "k-" if factor == 1 else "k:", lw=0.8)
        right.legend()
    right.set(title="windows that were not fitted", xlabel="peak [GB]", ylabel="counts x fitted bytes [GB]")
    figure.suptitle(str(result.get("device", "")))
    figure.savefig(path, dpi=110)
