"""Does the main job learn: `python -m benchmarks.tiny_grpo` runs recipes/tiny_grpo.yaml with three seeds (two cores).

Bar: mean reward from below 0.2 (first 20 steps) to above 0.7 (last 20 steps) within 300 s of training, every seed.
Nothing is reported unless tree log-probs of freshly sampled rollouts equal those of the unpatched model.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from matplotlib.figure import Figure

from benchmarks.machine import describe_machine, output_path
from harts_hf import tree_logprobs, unpatch
from harts_hf.cli.train import build_trainer, main, parse

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "tiny_grpo.yaml"
SEEDS = (0, 1, 2)
FIRST_BELOW, LAST_ABOVE, SECONDS = 0.2, 0.7, 300.0
# fp32, log-probs near -3 of a model of three layers: rounding is about 1e-6.
PARITY_BUDGET = 1e-5


def parity() -> float:
    """Largest difference between tree and stock log-probs on one batch of sampled trees."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(*parse([str(RECIPE), "--output_dir", folder]))
        rows = next(iter(trainer.get_train_dataloader()))
        sampled = trainer.rollout_func([row["prompt"] for row in rows], trainer)
    pairs = zip(sampled["prompt_ids"], sampled["completion_ids"], strict=True)
    trajectories = [torch.tensor(prompt + completion) for prompt, completion in pairs]
    model = trainer.model.eval()
    with torch.no_grad():
        ours = tree_logprobs(model, trajectories)
        unpatch(model)
        worst = 0.0
        for tokens, logprobs in zip(trajectories, ours, strict=True):
            stock = model(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
            worst = max(worst, float((stock - logprobs).abs().max()))
    return worst


def run(seed: int) -> tuple[dict, list[dict]]:
    """Trains with one seed; the summary with what the bar asks for, and the logged metrics."""
    with tempfile.TemporaryDirectory() as folder:
        assert main([str(RECIPE), "--seed", str(seed), "--output_dir", folder, "--save_strategy", "no"]) == 0
        summary = json.loads((Path(folder) / "summary.json").read_text())
        metrics = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    window = summary["window_steps"]
    reached = [
        entry
        for index, entry in enumerate(metrics)
        if entry["step"] >= window and mean_before(metrics, index, window) > LAST_ABOVE
    ]
    summary["above_bar_at_step"] = reached[0]["step"] if reached else None
    summary["above_bar_at_seconds"] = reached[0]["seconds"] if reached else None
    summary["met"] = (
        summary["first_mean_reward"] < FIRST_BELOW
        and summary["last_mean_reward"] > LAST_ABOVE
        and summary["seconds"] < SECONDS
    )
    return summary, metrics


def mean_before(metrics: list[dict], index: int, window: int) -> float:
    """Mean reward of the ``window`` steps up to a log."""
    step = metrics[index]["step"]
    rewards = [entry["reward"] for entry in metrics[: index + 1] if entry["step"] > step - window]
    return sum(rewards) / len(rewards)


def plot(curves: dict[int, list[dict]], path: Path) -> None:
    """Reward over training seconds, a line a seed."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for seed, metrics in curves.items():
        axes.plot([e["seconds"] for e in metrics], [e["reward"] for e in metrics], label=f"seed {seed}")
    axes.axhline(LAST_ABOVE, color="black", linewidth=0.8, linestyle="--")
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("mean reward of 5 steps")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def report() -> int:
    """Runs everything; the exit status is 0 if the bar is met."""
    out = output_path("tiny_grpo", __doc__)
    load = os.getloadavg()[0]
    difference = parity()
    print(f"parity: tree and stock log-probs differ by at most {difference:.1e} (budget {PARITY_BUDGET:.0e})")
    if difference > PARITY_BUDGET:
        print("parity check failed: nothing is reported", file=sys.stderr)
        return 1
    runs, curves = [], {}
    for seed in SEEDS:
        summary, curves[seed] = run(seed)
        runs.append(summary)
    met = all(summary["met"] for summary in runs)
    content = {
        "machine": {**describe_machine(), "load_average_at_start": round(load, 2)},
        "recipe": str(RECIPE.relative_to(ROOT)),
        "parity_max_difference": difference,
        "bar": {"first_below": FIRST_BELOW, "last_above": LAST_ABOVE, "seconds": SECONDS},
        "met": met,
        "runs": runs,
    }
    out.write_text(json.dumps(content, indent=2) + "\n")
    plot(curves, out.with_suffix(".png"))
    for summary in runs:
        reward = f"{summary['first_mean_reward']:.3f} -> {summary['last_mean_reward']:.3f}"
        seconds = f"{summary['seconds']:.0f} s ({summary['cpu_seconds']:.0f} s of CPU)"
        above = f"{summary['above_bar_at_seconds']} s ({summary['above_bar_at_step']} steps)"
        print(
            f"seed {summary['seed']}: {reward} in {seconds}, above {LAST_ABOVE} after {above}, "
            f"shared {summary['sharing_ratio']:.2f}x"
        )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(report())
