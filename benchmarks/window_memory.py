"""Peak memory of windows against the planner's counts: `python -m benchmarks.window_memory` (CPU).

Four questions. Does the peak follow the planner's counts (``Schedule.memory_counts``) times bytes that were fitted on
other windows? Does it stay flat when the tree grows 8 times at the same depth and budget? What does a limit on handed
bytes save, and cost in forward rows? Is everything freed at the end? Nothing is reported unless the windows' log-probs
and gradients are those of the unpatched model in float64.

Memory is that of tensors made by torch operations during the run, counted by storages (``LiveBytes``); parameters,
their gradients and the tables of the microbatches are there before and do not count.
"""

import argparse
import gc
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from matplotlib.figure import Figure
from torch import nn

from benchmarks.live_bytes import LiveBytes
from benchmarks.machine import describe_machine
from benchmarks.window_limits import limits_to_try, real_windows
from benchmarks.window_workloads import MODELS, SEED, Case, build_model, trees
from harts_hf import PlannerConfig, RolloutTree, Schedule, patch, unpatch
from harts_hf.modeling import LABEL_VALUES, handed_sizes, with_handed_bytes
from harts_hf.planner import CostModel
from harts_hf.planner.cost import nonnegative_fit
from harts_hf.runtime import TreeValues, TreeWindow, WindowRun
from harts_hf.verify.oracle import float64_everywhere

RESULTS = Path(__file__).parent / "results" / "window_memory.json"
BAR = 0.10
# Handed values and gradients by their bytes, which the planner knows exactly for a model, not row by row.
FEATURES = (
    "graph_rows",
    "graph_chunks",
    "graph_prefix_rows",
    "scoring_rows",
    "backward_rows",
    "backward_prefix_rows",
    "handed_bytes",
    "constant",
)


def cases() -> Iterator[Case]:
    """Windows to fit and to predict."""
    for tree in ("spine", "bush", "spine of long turns", "wide bush"):
        for budget in (128, 256, 512):
            yield Case(tree=tree, execution="replay", budget=budget)
            yield Case(tree=tree, execution="nested", budget=budget, max_graph_tokens=2 * budget)
        yield Case(tree=tree, execution="keep", budget=256)


def is_fitted(case: Case) -> bool:
    """Half the trees at two of three budgets are fitted; all else is predicted."""
    return case.tree in ("spine", "bush") and case.budget != 256


def check_parity(family: str) -> None:
    """Log-probs and gradients of a cut tree in every execution against the unpatched model.

    Raises:
        SystemExit: they differ.
    """
    model, rows = build_model(family).double(), trees()["bush"][:4]
    with float64_everywhere(model):
        expected = []
        for row in rows:
            ids = torch.from_numpy(row)[None]
            log_p = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
            expected.append(log_p.gather(1, ids[0, 1:, None])[:, 0])
        model.zero_grad()
        sum(values.sum() for values in expected).backward()
        gradients = [gradient_of(parameter).clone() for parameter in model.parameters()]
        for execution in ("replay", "nested", "keep"):
            window = TreeWindow(rows, Case(tree="bush", execution=execution, budget=128).planner)
            model.zero_grad()
            run = WindowRun(patch(model), window)
            log_probs = run.score().rows["log_prob"]
            counts = torch.from_numpy(window.tree.occurrence_counts.copy()).double()
            run.backward(TreeValues(rows={"log_prob": counts}), torch.Tensor.backward)
            for index, values in enumerate(expected):
                if (log_probs[window.label_rows(index)] - values).abs().max() > 1e-10:
                    raise SystemExit(f"no report: log-probs of {family}, {execution}, differ from the stock model's")
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                if (gradient_of(parameter) - gradient).abs().max() > 1e-9 * gradient.abs().max():
                    raise SystemExit(f"no report: gradients of {family}, {execution}, differ from the stock model's")
            unpatch(model)


def gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    """The gradient that a parameter has."""
    assert parameter.grad is not None
    return parameter.grad


def measure(model: nn.Module, trajectories: list[np.ndarray], case: Case) -> tuple[Schedule, np.ndarray, int]:
    """The schedule, the peak of live bytes within each of its ops, and the bytes that stay when the window is gone."""
    window = TreeWindow(trajectories, planner_of(model, case))
    schedule = window.schedule
    peaks: list[int] = []
    for batch in window.batches:
        for width in (3, 4):  # tables that are made at first use
            batch.conv(width)
    with LiveBytes() as live:
        train(model, window, live, peaks)
        del window, batch
        gc.collect()
        return schedule, np.array(peaks, float), live.now


def planner_of(model: nn.Module, case: Case) -> PlannerConfig:
    """The case's limits, with the bytes that this model hands over."""
    return replace(case.planner, cost=with_handed_bytes(CostModel(), handed_sizes(model, torch.float32)))


def train(model: nn.Module, window: TreeWindow, live: LiveBytes, peaks: list[int]) -> None:
    """Runs the schedule and appends each op's peak."""
    num_tokens = window.tree.num_tokens
    coefficients = TreeValues(rows={"log_prob": torch.ones(num_tokens)})
    is_nested = window.schedule.execution == "nested"
    run = WindowRun(model, window, mode="unscored" if is_nested else "train")
    run_forward = run._forward

    def forward(*args: Any) -> Any:
        return record(live, peaks, run_forward, *args)

    def backward(scalar: torch.Tensor) -> None:
        record(live, peaks, scalar.backward)

    run._forward = forward  # type: ignore[method-assign, assignment]
    if is_nested:
        wanted = dict.fromkeys(LABEL_VALUES, torch.ones(num_tokens, dtype=torch.bool))
        run.backward_unscored(coefficients, wanted, backward)
    else:
        run.score()
        run.backward(coefficients, backward)


def record(live: LiveBytes, peaks: list[int], function: Callable[..., Any], *args: Any) -> Any:
    """Calls ``function`` and appends the peak of live bytes while it ran."""
    live.restart()
    result = function(*args)
    peaks.append(live.peak)
    return result


def features(schedule: Schedule) -> np.ndarray:
    """The planner's counts while each op runs, and 1, ``[ops, 8]``."""
    counts = schedule.memory_counts()
    columns = [getattr(counts, name) for name in FEATURES[:-1]]
    return np.stack([*columns, np.ones(len(columns[0]))], axis=1)


def fit(measured: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Bytes per unit of each feature, none negative, by the smallest sum of squared relative errors over all ops."""
    return nonnegative_fit(np.concatenate([counts / peaks[:, None] for counts, peaks in measured]))


def study(family: str) -> dict[str, Any]:
    """Fit, predictions and growth of one model."""
    check_parity(family)
    model, rows = patch(build_model(family)), trees()
    found = {}
    for case in cases():
        schedule, peaks, left = measure(model, rows[case.tree], case)
        found[case] = (features(schedule), peaks, left)
        print(f"{family}: {case.tree}, {case.execution}, {case.budget}: {peaks.max() / 1e6:.1f} MB", flush=True)
    per_unit = fit([found[case][:2] for case in found if is_fitted(case)])
    windows: list[dict[str, Any]] = []
    for case, (counts, peaks, left) in found.items():
        predicted = float((counts @ per_unit).max())
        windows.append(
            {
                "tree": case.tree,
                "execution": case.execution,
                "budget": case.budget,
                "fitted": is_fitted(case),
                "peak_bytes": int(peaks.max()),
                "predicted_bytes": int(predicted),
                "error": round(predicted / float(peaks.max()) - 1, 4),
                "left_bytes": left,
            }
        )
    worst = max(abs(window["error"]) for window in windows if not window["fitted"])
    return {
        "bytes_per_unit": {name: round(float(value), 1) for name, value in zip(FEATURES, per_unit, strict=True)},
        "worst_error_of_predicted_windows": worst,
        "bar_met": worst <= BAR,
        "windows": windows,
        "growth": growth(model, rows, per_unit),
        "limits": limits(model, rows["8 histories"]),
    }


def studies() -> dict[str, Any]:
    """:func:`study` of every model, side by side: bytes do not depend on what else runs."""
    with ProcessPoolExecutor(len(MODELS), mp_context=get_context("spawn")) as pool:
        return dict(zip(MODELS, pool.map(study, MODELS), strict=True))


def growth(model: nn.Module, rows: dict[str, list[np.ndarray]], per_unit: np.ndarray) -> list[dict[str, Any]]:
    """Peaks of a tree and of one about 8 times as large, equally deep, at the same limits."""
    results = []
    one = Case(tree="1 history", execution="replay", budget=256)
    alone = TreeWindow(rows[one.tree], planner_of(model, one)).schedule.peak_handoff_bytes
    for execution, limits in (
        ("replay", {}),
        ("replay", {"max_handoff_bytes": int(1.5 * alone)}),
        ("nested", {"max_graph_tokens": 512}),
        ("keep", {}),
    ):
        peaks, tokens, handed, forwards, errors = [], [], [], [], []
        for tree in ("1 history", "8 histories"):
            schedule, ops, _ = measure(model, rows[tree], Case(tree=tree, execution=execution, budget=256, **limits))
            peaks.append(int(ops.max()))
            tokens.append(schedule.tree.num_tokens)
            handed.append(schedule.peak_handoff_tokens)
            forwards.append(schedule.forward_tokens)
            errors.append(round(float((features(schedule) @ per_unit).max()) / peaks[-1] - 1, 4))
        results.append(
            {
                "execution": execution,
                "limits": limits,
                "unique_tokens": tokens,
                "forward_rows": forwards,
                "peak_handed_rows": handed,
                "peak_bytes": peaks,
                "errors_of_predictions": errors,
                "ratio": round(peaks[1] / peaks[0], 3),
            }
        )
        print(results[-1], flush=True)
    return results


def limits(model: nn.Module, trajectories: list[np.ndarray]) -> list[dict[str, Any]]:
    """What limits on handed bytes cost and save in replay on a wide tree."""
    case = Case(tree="8 histories", execution="replay", budget=256)
    results = []
    for limit in limits_to_try(RolloutTree.from_trajectories(trajectories), planner_of(model, case)):
        schedule, ops, _ = measure(model, trajectories, replace(case, max_handoff_bytes=limit))
        results.append(
            {
                "max_handoff_bytes": limit,
                "planned_handoff_bytes": schedule.peak_handoff_bytes,
                "forward_rows_over_unique": round(schedule.forward_tokens / schedule.tree.num_tokens, 3),
                "peak_bytes": int(ops.max()),
            }
        )
        print(results[-1], flush=True)
    return results


def plot(result: dict[str, Any], path: Path) -> None:
    """Predicted against measured peaks."""
    figure = Figure(figsize=(5 * len(MODELS), 4.5), layout="constrained")
    for axes, family in zip(figure.subplots(1, len(MODELS)), MODELS, strict=True):
        for is_fit, marker in ((True, "o"), (False, "x")):
            windows = [w for w in result["models"][family]["windows"] if w["fitted"] == is_fit]
            points = [[w[key] / 1e6 for w in windows] for key in ("peak_bytes", "predicted_bytes")]
            axes.loglog(*points, marker, label="fitted" if is_fit else "predicted")
        ends = np.array(axes.get_xlim())
        axes.loglog(ends, ends, "k-", lw=0.8)
        for factor in (1 - BAR, 1 + BAR):
            axes.loglog(ends, factor * ends, "k:", lw=0.8)
        axes.set(title=family, xlabel="peak of live tensors [MB]", ylabel="planner's counts x fitted bytes [MB]")
        axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Checks, measures and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    out = parser.parse_args().out
    result: dict[str, Any] = {
        **describe_machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "seed": SEED,
        "device": "cpu",
        "dtype": "float32",
        "counter": "torch dispatch mode: storages made by operations and not yet freed (benchmarks/live_bytes.py)",
        "parity": "float64, log-probs 1e-10, gradients 1e-9 of each parameter's largest, every execution: passed",
        "bar": BAR,
        "models": studies(),
        "limits_of_real_windows": real_windows(),
    }
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n")
    plot(result, out.with_suffix(".png"))
    for family, found in result["models"].items():
        print(family, found["worst_error_of_predicted_windows"], found["bytes_per_unit"])


if __name__ == "__main__":
    main()
