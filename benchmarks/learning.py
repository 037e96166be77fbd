"""Does a recipe learn: `python -m benchmarks.learning babyai_grpo` trains recipes/babyai_grpo.yaml with three seeds.

Recipes: tiny_grpo, tiny_ppo, babyai_grpo, textarena_grpo, each with a bar (`CASES`): mean reward of the first and of
the last 20 steps, and seconds of training, for every seed. Written beside them: what random actions and the best play
get by the same limits. Nothing is reported unless tree log-probs of freshly sampled rollouts equal those of the
unpatched model.
One core; results/<recipe>.json, and its curves in results/<recipe>.png.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure

from benchmarks.machine import RESULTS, describe_machine
from benchmarks.reference_play import (
    Player,
    follow_the_bot,
    guess_at_random,
    guess_in_the_middle,
    mean_reward,
    move_at_random,
)
from harts_hf import tree_logprobs, unpatch
from harts_hf.cli.train import build_trainer, main, parse

ROOT = Path(__file__).resolve().parents[1]
SEEDS = (0, 1, 2)
# fp32, log-probs near -3 of a model of three layers: rounding is about 1e-6.
PARITY_BUDGET = 1e-5


@dataclass(frozen=True)
class Bar:
    """What every seed has to reach: mean reward of the first and the last 20 steps, seconds of training.

    Seconds are the processor's: recipes here take one core, and what else a machine does is not counted.
    """

    first_below: float
    last_above: float
    seconds: float


# With each bar the players to compare with, by name.
CASES: dict[str, tuple[Bar, dict[str, Player]]] = {
    "tiny_grpo": (Bar(first_below=0.2, last_above=0.7, seconds=300.0), {}),
    "tiny_ppo": (Bar(first_below=0.2, last_above=0.7, seconds=600.0), {}),
    "babyai_grpo": (
        Bar(first_below=0.2, last_above=0.8, seconds=900.0),
        {"random_actions": move_at_random, "best_play": follow_the_bot},
    ),
    "textarena_grpo": (
        Bar(first_below=0.5, last_above=0.85, seconds=900.0),
        {"random_actions": guess_at_random, "best_play": guess_in_the_middle},
    ),
}


def parity(recipe: Path) -> float:
    """Largest difference between tree and stock log-probs on one batch of sampled trees."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(*parse([str(recipe), "--output_dir", folder]))
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


def run(recipe: Path, seed: int, bar: Bar, changes: Sequence[str] = ()) -> tuple[dict, list[dict]]:
    """Trains with one seed, and ``changes`` on the command line.

    Returns:
        The summary with what the bar asks for, and the logged metrics.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = ["--seed", str(seed), "--output_dir", folder, "--save_strategy", "no", *changes]
        assert main([str(recipe), *options]) == 0
        summary = json.loads((Path(folder) / "summary.json").read_text())
        metrics = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    window = summary["window_steps"]
    reached = [
        entry
        for index, entry in enumerate(metrics)
        if entry["step"] >= window and mean_before(metrics, index, window) > bar.last_above
    ]
    summary["above_bar_at_step"] = reached[0]["step"] if reached else None
    summary["above_bar_at_seconds"] = reached[0]["seconds"] if reached else None
    summary["met"] = (
        summary["first_mean_reward"] < bar.first_below
        and summary["last_mean_reward"] > bar.last_above
        and summary["cpu_seconds"] < bar.seconds
    )
    return summary, metrics


def mean_before(metrics: list[dict], index: int, window: int) -> float:
    """Mean reward of the ``window`` steps up to a log."""
    step = metrics[index]["step"]
    rewards = [entry["reward"] for entry in metrics[: index + 1] if entry["step"] > step - window]
    return sum(rewards) / len(rewards)


def plot(curves: dict[int, list[dict]], bar: Bar, references: dict[str, float], path: Path) -> None:
    """Reward over training steps, a line for each seed, the bar and the players dashed."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for seed, metrics in curves.items():
        axes.plot([e["step"] for e in metrics], [e["reward"] for e in metrics], label=f"seed {seed}")
    for name, value in {"bar": bar.last_above, **references}.items():
        axes.axhline(value, color="black" if name == "bar" else "grey", linewidth=0.8, linestyle="--")
        axes.annotate(name.replace("_", " "), (0, value), fontsize=8, va="bottom")
    axes.set_xlabel("training step")
    axes.set_ylabel("mean reward of 5 steps")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def report(name: str, out: Path) -> int:
    """Runs everything; the exit status is 0 if the bar is met."""
    recipe = ROOT / "recipes" / f"{name}.yaml"
    bar, players = CASES[name]
    load = os.getloadavg()[0]
    difference = parity(recipe)
    print(f"parity: tree and stock log-probs differ by at most {difference:.1e} (budget {PARITY_BUDGET:.0e})")
    if difference > PARITY_BUDGET:
        print("parity check failed: nothing is reported", file=sys.stderr)
        return 1
    arguments, *_ = parse([str(recipe)])
    references = {player: mean_reward(arguments, play) for player, play in players.items()}
    runs, curves = [], {}
    for seed in SEEDS:
        summary, curves[seed] = run(recipe, seed, bar)
        runs.append(summary)
    met = all(summary["met"] for summary in runs)
    content = {
        "machine": {**describe_machine(), "load_average_at_start": round(load, 2)},
        "recipe": str(recipe.relative_to(ROOT)),
        "parity_max_difference": difference,
        "bar": asdict(bar),
        "references": references,
        "met": met,
        "runs": runs,
        "curves": {seed: [[entry["step"], entry["reward"]] for entry in curve] for seed, curve in curves.items()},
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(content, indent=2) + "\n")
    plot(curves, bar, references, out.with_suffix(".png"))
    for player, reward in references.items():
        print(f"{player.replace('_', ' ')}: {reward:.3f}")
    for summary in runs:
        reward = f"{summary['first_mean_reward']:.3f} -> {summary['last_mean_reward']:.3f}"
        seconds = f"{summary['seconds']:.0f} s ({summary['cpu_seconds']:.0f} s of CPU)"
        above = f"{summary['above_bar_at_seconds']} s ({summary['above_bar_at_step']} steps)"
        print(
            f"seed {summary['seed']}: {reward} in {seconds}, above {bar.last_above} after {above}, "
            f"shared {summary['sharing_ratio']:.2f}x"
        )
    return 0 if met else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=CASES, help="which recipe")
    parser.add_argument("--out", type=Path, help="(default: benchmarks/results/RECIPE.json)")
    options = parser.parse_args()
    sys.exit(report(options.recipe, options.out or RESULTS / f"{options.recipe}.json"))
