"""Peaks of windows on a GPU as the planner's counts times bytes that are fitted to peaks of other windows.

A window's peak is the largest of its ops'. Beside rows and handed bytes, an op that runs a backward has a constant:
the head's logits of a chunk and their gradients in float32, the vocabulary wide, and the largest weight's gradient.
"""

import argparse

import numpy as np

from benchmarks.gpu import record
from benchmarks.gpu.registry import VOCAB
from benchmarks.gpu.trees import bush, draw_tokens, spine
from benchmarks.gpu.whole.windows import Window
from harts_hf import PlannerConfig, Schedule
from harts_hf.planner.cost import nonnegative_fit

UNITS = ("graph_rows", "backward_rows", "handed_bytes", "backward")
BUDGETS = (2048, 4096, 8192)  # the one in the middle is predicted
TREE_TOKENS = 26000


def trees(vocab: int) -> dict[str, list[np.ndarray]]:
    """Trajectories of the trees that are measured."""
    return {name: draw_tokens(make(TREE_TOKENS), vocab) for name, make in (("spine", spine), ("bush", bush))}


def planner(execution: str, budget: int) -> PlannerConfig:
    limits = {"max_graph_tokens": 2 * budget} if execution == "nested" else {}
    return PlannerConfig(max_tokens_per_microbatch=budget, sharing="always", execution=execution, **limits)


def units(schedule: Schedule) -> np.ndarray:
    """``[ops, 4]``: the counts while each op runs, and whether it runs a backward."""
    counts = schedule.memory_counts()
    columns = [getattr(counts, name) for name in UNITS[:3]]
    return np.stack([*columns, counts.backward_rows > 0], axis=1).astype(float)


def fit(windows: list[np.ndarray], peaks: list[float]) -> tuple[np.ndarray, bool]:
    """Bytes per unit, none negative, by the smallest squared relative errors at the op of each window that they make
    the largest; and whether these ops settled.
    """
    largest = [int(window[:, :2].sum(axis=1).argmax()) for window in windows]
    for _ in range(100):
        table = np.stack([w[op] / peak for w, op, peak in zip(windows, largest, peaks, strict=True)])
        found = nonnegative_fit(table)
        before, largest = largest, [int((window @ found).argmax()) for window in windows]
        if largest == before:
            return found, True
    return found, False


def predict(measured: dict[tuple[str, str, int], tuple[np.ndarray, float]]) -> dict:
    """Fit and predictions of windows, by tree, execution and budget: their units and peaks in bytes."""
    fitted = [key for key in measured if key[2] != BUDGETS[1]]
    per_unit, settled = fit([measured[key][0] for key in fitted], [measured[key][1] for key in fitted])
    windows = [
        {
            "tree": key[0],
            "execution": key[1],
            "budget": key[2],
            "fitted": key in fitted,
            "peak_bytes": int(peak),
            "predicted_bytes": int((counts @ per_unit).max()),
            "error": round(float((counts @ per_unit).max() / peak) - 1, 4),
        }
        for key, (counts, peak) in measured.items()
    ]
    return {
        "settled": settled,
        "bytes_per_unit": dict(zip(UNITS, map(float, per_unit), strict=True)),
        "worst_error_of_predicted_windows": max(abs(w["error"]) for w in windows if not w["fitted"]),
        "windows": windows,
    }


def main(options: argparse.Namespace) -> None:
    """Predicts the recorded peaks anew, which needs no GPU."""
    result = record.read(options.record)
    trajectories = trees(VOCAB)
    counts: dict[tuple[str, str, int], np.ndarray] = {}
    for row in (row for row in result["rows"] if row["op"] == "memory"):
        measured = {}
        for window in row["windows"]:
            key = window["tree"], window["execution"], window["budget"]
            if key not in counts:
                counts[key] = units(Window(trajectories[key[0]], planner(*key[1:])).schedule)
            measured[key] = counts[key], float(window["peak_bytes"])
        row.update(predict(measured))
        print(row["family"], row["bytes_per_unit"], row["worst_error_of_predicted_windows"])
    record.write(options.out, result)
