"""Draws what ``whole.py`` wrote: python draw_whole.py WHOLE.json OUT.png"""

import json
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure


def main() -> None:
    source, out = map(Path, sys.argv[1:])
    result = json.loads(source.read_text())
    speeds = [row for row in result["rows"] if row["op"] == "speed"]
    windows = [(row["family"], window) for row in result["rows"] if row["op"] == "memory" for window in row["windows"]]
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    bars = [(f"{row['family']}\n{name}", entry) for row in speeds for name, entry in row["shapes"].items()]
    places = np.arange(len(bars))
    drawn = [
        ("speedup", "forward and backward"),
        ("speedup_with_scoring", "the package's update (scoring where there are several microbatches)"),
        ("sharing_ratio", "sharing ratio (rows)"),
    ]
    drawn = [pair for pair in drawn if any(pair[0] in entry for _, entry in bars)]
    for place, (key, label) in enumerate(drawn):
        left.bar(places + 0.27 * (place - 1), [entry.get(key, 0) for _, entry in bars], 0.27, label=label)
    left.set_xticks(places, [label for label, _ in bars], rotation=90, fontsize=7)
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
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main()
