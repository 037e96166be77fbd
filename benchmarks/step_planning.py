"""CPU time from TRL's padded tensors to the tables of a window: `python -m benchmarks.step_planning` (one core).

Parts, in the order of a step: the rows without their padding, their tree, its plan on one rank, the tables of all
microbatches and their bytes in one buffer for the copy to a GPU; then what comes while a GPU computes or waits for it:
rows of the tree of each entry (`index`), and the tables that the first linear layer of the first microbatch makes
(`chains`). The least of several runs of each, since other programs share the machine. `--before FILE` keeps what an
earlier commit measured in the same session beside it.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.machine import RESULTS, describe_machine
from benchmarks.planner import shape_trees
from harts_hf.batch.tables import _tensors_of, packed
from harts_hf.forest import random_tokens
from harts_hf.kernels.linear_attention.fla_tables import packed_chains
from harts_hf.planner import PlannerConfig
from harts_hf.runtime.planning import WindowPlanner
from harts_hf.trainers.rows import PaddedRows
from harts_hf.tree import IntArray, RolloutTree

VOCAB = 150_000
# Set, groups (None for all) and rows of a microbatch.
WORKLOADS: dict[str, tuple[str, list[int] | None, int]] = {
    "miniswe_b_drop 0": ("miniswe_b_drop", [0], 32_768),
    "miniswe_b_drop 1": ("miniswe_b_drop", [1], 32_768),
    "miniswe_b_drop 13": ("miniswe_b_drop", [13], 98_304),
    "tau_airline_b 0": ("tau_airline_b", [0], 32_768),
    "tau_airline_b": ("tau_airline_b", None, 32_768),
    "tot_game24 0": ("tot_game24", [0], 32_768),
}
OF_PLANNING = ("rows", "tree", "plan", "tables", "packing")


def trajectories_of(name: str, groups: list[int] | None) -> list[IntArray]:
    """Random tokens in the shapes of groups of a set."""
    found, trees = [], shape_trees(name)
    for number in range(len(trees)) if groups is None else groups:
        tree = trees[number].with_token_ids(random_tokens(trees[number], VOCAB, np.random.default_rng(number)))
        found += [tree.token_ids[tree.path(index)] for index in range(tree.num_trajectories)]
    return found


def batches_of(trajectories: list[IntArray]) -> list[dict[str, torch.Tensor]]:
    """A batch of TRL's for each trajectory, padded as TRL pads a generation: prompts are its first third."""
    cuts = [len(tokens) // 3 + 1 for tokens in trajectories]
    prompts, rest = max(cuts), max(len(tokens) - cut for tokens, cut in zip(trajectories, cuts, strict=True))
    batches = []
    for tokens, cut in zip(trajectories, cuts, strict=True):
        ids = np.concatenate([np.zeros(prompts - cut, np.int64), tokens, np.zeros(rest - len(tokens) + cut, np.int64)])
        mask = np.zeros(len(ids), np.int64)
        mask[prompts - cut : prompts - cut + len(tokens)] = 1
        both = {"ids": torch.from_numpy(ids)[None], "mask": torch.from_numpy(mask)[None]}
        batches.append(
            {f"prompt_{kind}": tensor[:, :prompts].clone() for kind, tensor in both.items()}
            | {f"completion_{kind}": tensor[:, prompts:].clone() for kind, tensor in both.items()}
        )
    return batches


def parts_of(batches: list[dict[str, torch.Tensor]], planner: WindowPlanner) -> dict[str, float]:
    """CPU seconds of each part of one step."""
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        started = time.process_time()
        found = work()
        seconds[name] = time.process_time() - started
        return found

    def rows_and_trajectories() -> tuple[list[PaddedRows], list[list[IntArray]]]:
        rows = [PaddedRows.from_batch(batch) for batch in batches]
        return rows, [one.trajectories() for one in rows]

    def indices() -> list[Any]:
        paths = iter(tree.paths() if hasattr(tree, "paths") else map(tree.path, range(tree.num_trajectories)))
        return [one.index([next(paths) for _ in part]) for one, part in zip(rows, parts, strict=True)]

    def chains() -> None:
        first = window.batches[0]
        first.conv(4)
        states = int(first.linear.initial.max()) + 1
        packed_chains(first.linear, first.exports.get("states", torch.zeros(0, dtype=torch.int64)), states)

    rows, parts = timed("rows", rows_and_trajectories)
    tree = timed("tree", lambda: RolloutTree.from_trajectories([tokens for part in parts for tokens in part]))
    window = timed(
        "plan",
        lambda: planner.with_execution_chosen(can_skip_scoring=True, num_rows=tree.num_tokens)(tree),
    )
    moved = timed("tables", lambda: window.to("cpu"))
    # Of the window as it is moved: with the dummy where that is made for every window.
    timed("packing", lambda: [packed(_tensors_of(batch)) for batch in (*moved.batches, *_dummies(moved))])
    timed("index", indices)
    timed("chains", chains)
    return seconds


def _dummies(window: Any) -> list[Any]:
    return [window.dummy] if "dummy" in vars(window) else []


def main() -> None:
    """Measures all workloads and writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "step_planning.json", help="(default: %(default)s)")
    parser.add_argument("--before", type=Path, help="what an earlier commit wrote")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    # As in a training, which has freed larger ones: the allocator then keeps pages instead of asking for new ones.
    np.ones(3_500_000)
    rows = []
    for name, (which, groups, budget) in WORKLOADS.items():
        trajectories = trajectories_of(which, groups)
        batches = batches_of(trajectories)
        config = PlannerConfig(max_tokens_per_microbatch=budget, max_graph_tokens=budget)
        planner = WindowPlanner(config=config, vocab_size=VOCAB)
        repeats = options.repeats if groups is not None else max(1, options.repeats // 10)
        runs = [parts_of(batches, planner) for _ in range(repeats)]
        least = {part: round(1e3 * min(run[part] for run in runs), 3) for part in runs[0]}
        rows.append(
            {
                "workload": name,
                "tokens": sum(map(len, trajectories)),
                "budget": budget,
                "milliseconds": least,
                "planning_milliseconds": round(sum(least[part] for part in OF_PLANNING), 3),
                "all_milliseconds": round(sum(least.values()), 3),
            }
        )
        print(name, rows[-1]["planning_milliseconds"], rows[-1]["all_milliseconds"], least, flush=True)
    result = {**describe_machine(), "load": [round(load, 1) for load in os.getloadavg()], "rows": rows}
    if options.before is not None:
        result["before"] = json.loads(options.before.read_text())
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
