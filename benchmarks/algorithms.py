"""PPO beside GRPO and RLOO on one task and budget, and with nothing shared: `python -m benchmarks.algorithms`.

Each way trains the model of recipes/tiny_ppo.yaml on its task for 600 steps of 128 rollouts, with three seeds; what
differs is said in `WAYS`. RLOO stands for its advantages: TRL's own RLOO cannot take rollouts of an environment, and
GRPO without scaling has them but for the factor n / (n - 1). A run of that length that the result file has is not made
again, so the command may be stopped and goes on. One core, about an hour; results/algorithms.json and .png.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from benchmarks.learning import CASES, ROOT, SEEDS, run
from benchmarks.machine import RESULTS, describe_machine

STEPS = 600
AS_TRL = ("--tree_credit", "trajectory", "--max_steps", str(STEPS))
AS_GRPO = ("--entropy_coef", "0.01")  # the bonus of tiny_grpo
# Name: the recipe, and what of it is changed.
WAYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "PPO": ("tiny_ppo", AS_GRPO),
    "GRPO": ("tiny_grpo", AS_TRL),
    "RLOO": ("tiny_grpo", (*AS_TRL, "--scale_rewards", "none")),
    "PPO, nothing shared": ("tiny_ppo", (*AS_GRPO, "--tree_sharing", "never")),
}
PANELS = {"The same task and budget": ("PPO", "GRPO", "RLOO"), "Shared or not": ("PPO", "PPO, nothing shared")}
WINDOW = 10  # logs of 5 steps each, over which curves are averaged before they are compared

Curve = list[list[float]]


def train(way: str, seed: int) -> dict[str, Any]:
    """One run: what its summary says, with its curve of ``[step, reward]``."""
    recipe, changes = WAYS[way]
    summary, metrics = run(ROOT / "recipes" / f"{recipe}.yaml", seed, CASES[recipe][0], changes)
    curve = [[entry["step"], entry["reward"]] for entry in metrics]
    return {**summary, "commit": describe_machine()["commit"], "curve": curve}


def averaged(curves: Mapping[str, Curve]) -> NDArray[np.float64]:
    """``[seeds, logs]``, running means of :data:`WINDOW` logs, as far as all curves go."""
    count = min(map(len, curves.values()))
    rewards = np.array([[reward for _, reward in curve[:count]] for curve in curves.values()])
    return np.apply_along_axis(np.convolve, 1, rewards, np.full(WINDOW, 1 / WINDOW), mode="valid")


def apart(one: Mapping[str, Curve], other: Mapping[str, Curve]) -> dict[str, float]:
    """How far the means of two ways are apart, beside how far seeds of one way are; running means at their largest.

    As far as curves of both go.
    """
    a, b = averaged(one), averaged(other)
    count = min(a.shape[1], b.shape[1])
    a, b = a[:, :count], b[:, :count]
    ranges = np.maximum(a.max(axis=0) - a.min(axis=0), b.max(axis=0) - b.min(axis=0))
    overlap = (a.min(axis=0) <= b.max(axis=0)) & (b.min(axis=0) <= a.max(axis=0))
    return {
        "means": float(np.abs(a.mean(axis=0) - b.mean(axis=0)).max()),
        "seeds": float(ranges.max()),
        "part_of_steps_where_ranges_overlap": float(overlap.mean()),
    }


def plot(runs: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Mean over seeds, the range between them shaded."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    panels: list[Axes] = list(figure.subplots(1, 2, sharey=True))
    for axes, (title, ways) in zip(panels, PANELS.items(), strict=True):
        for way in ways:
            curves = {seed: one["curve"] for seed, one in runs.get(way, {}).items()}
            if not curves:
                continue
            rewards = averaged(curves)
            steps = [step for step, _ in min(curves.values(), key=len)][WINDOW - 1 :]
            (line,) = axes.plot(
                steps, rewards.mean(axis=0), label=f"{way} ({len(curves)} seed{'s' if len(curves) > 1 else ''})"
            )
            axes.fill_between(steps, rewards.min(axis=0), rewards.max(axis=0), color=line.get_color(), alpha=0.15)
        axes.set_title(title)
        axes.set_xlabel("training step (128 rollouts)")
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
    panels[0].set_ylabel(f"mean reward of {5 * WINDOW} steps")
    figure.savefig(path, dpi=120)


def write(runs: Mapping[str, Mapping[str, Any]], out: Path) -> dict[str, Any]:
    """The result file and its picture, of the runs that there are; the file's content."""
    runs = {way: found for way, found in runs.items() if found}
    curves = {way: {seed: one["curve"] for seed, one in found.items()} for way, found in runs.items()}
    both = [curves[way] for way in PANELS["Shared or not"] if way in curves]
    content = {
        "machine": describe_machine(),
        "steps": STEPS,
        "ways": {way: {"recipe": recipe, "changes": " ".join(changes)} for way, (recipe, changes) in WAYS.items()},
        "last_mean_reward": {
            way: {seed: one["last_mean_reward"] for seed, one in found.items()} for way, found in runs.items()
        },
        "cpu_seconds": {way: {seed: one["cpu_seconds"] for seed, one in found.items()} for way, found in runs.items()},
        "shared_or_not_apart": apart(*both) if len(both) == 2 else None,
        "runs": runs,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(content) + "\n")
    plot(runs, out.with_suffix(".png"))
    return content


def main(argv: list[str] | None = None) -> None:
    """Makes the runs that are missing, seed after seed, and writes the result after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "algorithms.json", help="(default: %(default)s)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="(default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS), help="(default: %(default)s)")
    options = parser.parse_args(argv)
    runs: dict[str, dict[str, Any]] = json.loads(options.out.read_text())["runs"] if options.out.exists() else {}
    for seed in options.seeds:
        for way in options.ways:
            if runs.setdefault(way, {}).get(str(seed), {}).get("steps") != STEPS:
                runs[way][str(seed)] = train(way, seed)
                write(runs, options.out)
    content = write(runs, options.out)
    for name in ("last_mean_reward", "cpu_seconds", "shared_or_not_apart"):
        print(f"{name}: {json.dumps(content[name])}")


if __name__ == "__main__":
    main()
