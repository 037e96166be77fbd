"""How many layers of Ling-3.0-flash fit, and what the planner's model says of 64 GPUs; needs no GPU."""

import argparse

from benchmarks.ranks.jobs import WORKLOADS
from benchmarks.ranks.large import BACKENDS, BUDGET, fitting, simulated
from benchmarks.update.workloads import groups_of
from harts_hf.forest import concatenate_trees
from harts_hf.runtime.budgets import parse_bytes


def main(options: argparse.Namespace) -> None:
    """Prints both."""
    room = parse_bytes("--memory", options.memory or "141GB")
    trees = [group.shape for group in groups_of(options.shapes, WORKLOADS["miniswe20"].shapes, dry=options.dry_run)]
    budget = BUDGET // 128 if options.dry_run else BUDGET
    for backend in BACKENDS:
        found = fitting(trees[0], backend, options.gpus, room, budget=budget, dry=options.dry_run)
        parts = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in found["predicted"].items() if size)
        print(
            f"{backend} on {options.gpus}: {found['layers']} of {found['whole']} layers, peak "
            f"{found['predicted_peak'] / 1e9:.1f} GB predicted; parts in GB: {parts}"
        )
    print("the planner's model, all groups of miniswe_b_drop (seconds of forwards and backwards alone):")
    for row in simulated(concatenate_trees(trees), budget=budget):
        print(
            f"  {row['gpus']} GPUs, {row['copies']} x 20 groups: {row['speedup']:.1f}x one GPU, {row['of_bound']:.3f} "
            f"of the bound, balance {row['balance']:.3f}, {row['dummies']} dummies of {row['ops']} ops, "
            f"{row['exchanged_bytes'] / 1e6:.0f} MB exchanged"
        )
