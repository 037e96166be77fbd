"""How many layers of Ling-3.0-flash fit, and what the planner's model says of 64 GPUs; needs no GPU."""

import argparse

from benchmarks.gpu import record
from benchmarks.ranks.jobs import WORKLOADS
from benchmarks.ranks.large import BACKENDS, BUDGET, fitting, simulated
from benchmarks.ranks.models import FLASH
from benchmarks.update.workloads import groups_of
from harts_hf.forest import concatenate_trees
from harts_hf.runtime.budgets import parse_bytes


def main(options: argparse.Namespace) -> None:
    """Prints both; writes them if asked to."""
    room = parse_bytes("--memory", options.memory or "141GB")
    trees = [group.shape for group in groups_of(options.shapes, WORKLOADS["miniswe20"].shapes, dry=options.dry_run)]
    budget = BUDGET // 128 if options.dry_run else BUDGET
    found = {"job": f"fit-{options.gpus}", "kind": "fit", "gpus": options.gpus, "memory": room, "model": FLASH}
    for backend in BACKENDS:
        fits = fitting(trees[0], backend, options.gpus, room, budget=budget, dry=options.dry_run)
        found[backend] = fits
        parts = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in fits["predicted"].items() if size)
        print(
            f"{backend} on {options.gpus}: {fits['layers']} of {fits['whole']} layers, peak "
            f"{fits['predicted_peak'] / 1e9:.1f} GB predicted; parts in GB: {parts}"
        )
    print("the planner's model, all groups of miniswe_b_drop, forwards and backwards alone:")
    found["simulated"] = simulated(concatenate_trees(trees), budget=budget)
    for row in found["simulated"]:
        print(
            f"  {row['gpus']} GPUs, {row['copies']} x 20 groups: {row['speedup']:.1f}x one GPU, {row['of_bound']:.3f} "
            f"of the bound, balance {row['balance']:.3f}, {row['dummies']} dummies of {row['ops']} ops, "
            f"{row['exchanged_bytes'] / 1e6:.0f} MB exchanged"
        )
    if options.out:
        record.write(options.out, found)
