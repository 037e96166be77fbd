"""A picture of rows: what each side's step takes, and speed-ups over the sharing ratio."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from harts_hf.bench.clock import PHASES
from harts_hf.bench.sides import KINDS

COLORS = {"prepare": "C7", "old_log_probs": "C4", "planning": "C3", "forward_backward": "C0", "clipping": "C8",
          "optimizer": "C2", "other": "C9"}  # fmt: skip
SPEEDUPS = {"speedup_stock": ("stock TRL", "s"), "speedup": ("packed, without sharing", "o"),
            "speedup_collapsed": ("nested prefixes collapsed", "^")}  # fmt: skip


def plot_rows(rows: Sequence[Mapping[str, Any]], path: str | Path, title: str = "") -> None:
    """Draws rows that passed the parity check.

    Args:
        rows: as :func:`harts_hf.bench.report.row_of` makes them; the last is drawn by phase.
        path: of the picture, any form that matplotlib writes.
        title: over it.

    Raises:
        ValueError: no row that passed.
    """
    rows = [row for row in rows if row["parity"]["passed"]]
    if not rows:
        raise ValueError("expected at least one row that passed the parity check, got none")
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    last = rows[-1]
    shown = {kind: last["sides"][kind] for kind in KINDS if last["sides"].get(kind, {}).get("phases")}
    bottom = np.zeros(len(shown))
    for phase in PHASES:
        seconds = np.array([max(0.0, side["phases"][phase]) for side in shown.values()])
        if seconds.any():
            left.bar(list(shown), seconds, bottom=bottom, color=COLORS[phase], label=phase.replace("_", " "))
            bottom += seconds
    names = ", ".join(last["groups"][:3]) + (", ..." if len(last["groups"]) > 3 else "")
    left.set(ylabel="seconds of an optimizer step")
    left.set_title(f"groups {names}", parse_math=False)
    left.tick_params(axis="x", labelrotation=20)
    left.set_ylim(top=1.35 * bottom.max())  # room for the legend above the bars
    left.legend(fontsize=8, ncols=3, loc="upper center")
    for key, (label, marker) in SPEEDUPS.items():
        points = [(row["sharing_ratio"], row[key]) for row in rows if key in row]
        if points:
            right.plot(*zip(*points, strict=True), marker, label=f"over {label}")
    ideal = sorted((row["sharing_ratio"], row["ideal"]) for row in rows if "ideal" in row)
    if ideal:
        right.plot(*zip(*ideal, strict=True), "k_", markersize=9, label="ideal over packed")
    right.axhline(1, color="grey", linewidth=0.8)
    right.set(xlabel="sharing ratio (tokens / unique tokens)", ylabel="speed-up of the tree", title="whole steps")
    right.set_ylim(bottom=0, top=1.35 * right.get_ylim()[1])  # room for the legend
    right.legend(fontsize=8, loc="upper left")
    figure.suptitle(title, parse_math=False)  # names may hold dollars
    figure.savefig(path, dpi=110)
