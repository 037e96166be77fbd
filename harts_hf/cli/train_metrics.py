"""The file of a run's logs, and the picture of its rewards or losses."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from harts_hf.cli.output import replacing

# First and last means are taken over so many steps.
WINDOW = 20


def cut_metrics(path: Path, step: int) -> list[dict[str, Any]]:
    """Leaves the entries up to a step in a file, and returns them."""
    entries = [entry for entry in _read_metrics(path) if entry["step"] <= step]
    with replacing(path) as new:
        new.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return entries


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    """The entries of a file, if there is one, up to the first line that is none of ours or was not finished."""
    entries: list[dict[str, Any]] = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            break
        if not isinstance(entry, dict) or not {"step", "seconds"} <= entry.keys():
            break
        entries.append(entry)
    return entries


def values_of(entries: list[dict[str, Any]], measure: str) -> np.ndarray:
    """``[len(entries)]`` float64 of a metric; NaN for a reward where no completion could be scored (TRL logs None)."""
    return np.array([entry[measure] for entry in entries], np.float64)


def shown(value: float | None, width: int = 0) -> str:
    """A mean reward or loss as progress lines have it, at least ``width`` characters wide."""
    return "none".rjust(width) if value is None else f"{value:{width}.3f}"


def plot_measure(entries: list[dict[str, Any]], measure: str, path: Path) -> None:
    """Draws a metric of logs, ``reward`` or ``loss``, and its running mean, into a picture."""
    from matplotlib.figure import Figure  # a tenth of the time of a start

    steps = np.array([entry["step"] for entry in entries])
    values = values_of(entries, measure)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, values, color="#30638e", alpha=0.35, linewidth=1, label=f"mean {measure} at each log")
    known = steps[~np.isnan(values)]
    smooth = [np.nanmean(values[(steps > step - WINDOW) & (steps <= step)]) for step in known]
    axes.plot(known, smooth, color="#d1495b", linewidth=2, label=f"mean of the last {WINDOW} steps")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(measure)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right" if measure == "loss" else "lower right")
    figure.savefig(path, dpi=120)
