"""Time per computed token of the linear rules on a CPU, against Transformers' torch fallbacks.

    python benchmarks/cpu_linear.py [--quick] [--out benchmarks/results/cpu_linear.json]

Two cases. ``chain``: one trajectory of 1,024 tokens, the same work on both sides. ``tree``: the first trajectories of
a real group (shapes of ``vmcts_dafny_bst``, in examples/shapes) as one tree, against one trajectory at a
time. A computed token is a row that the rule processes: expanded ones for Transformers, unique and replayed ones for
the tree; ``speedup`` is whole against whole. CPU times of the process, medians of interleaved runs, forward plus
backward. Nothing is reported when outputs or gradients disagree.
"""

import argparse
import gzip
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
from matplotlib.figure import Figure
from transformers.models.bailing_hybrid import modeling_bailing_hybrid
from transformers.models.qwen3_5 import modeling_qwen3_5

from harts_hf.batch import LinearTables
from harts_hf.kernels.linear_attention import tree_gated_delta_rule, tree_kimi_delta_rule
from harts_hf.planner.chunks import build_chunk_tree
from harts_hf.tree import RolloutTree

ROOT = Path(__file__).resolve().parents[1]
HEADS, DIM, SEED = 2, 64, 0
TOLERANCE = 1e-4  # of the largest value: fp32 fallbacks with decays to -1 a step differ by up to 2e-6
RULES = {
    "gdn": (tree_gated_delta_rule, modeling_qwen3_5.torch_chunk_gated_delta_rule),
    "kda": (tree_kimi_delta_rule, modeling_bailing_hybrid.chunk_kimi_delta_attention),
}


def real_tree(max_trajectories: int) -> RolloutTree:
    """The first trajectories of a group of vmcts_dafny_bst."""
    with gzip.open(ROOT / "examples" / "shapes" / "vmcts_dafny_bst.jsonl.gz", "rt") as lines:
        group = json.loads(next(lines))
    tree = RolloutTree.from_shape(group["parent"], group["length"], group["sample_node"], sample_tokens(group))
    return RolloutTree.from_trajectories(
        [tree.token_ids[tree.path(index)] for index in range(min(max_trajectories, tree.num_trajectories))]
    )


def sample_tokens(group: dict) -> np.ndarray:
    """Tokens that are all different, so that siblings differ."""
    return np.arange(sum(group["length"]))


def inputs(rule: str, num_rows: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    gate = (HEADS, DIM) if rule == "kda" else (HEADS,)
    q, k, v = (torch.randn(num_rows, HEADS, DIM, generator=generator) for _ in range(3))
    g, beta = (torch.rand(num_rows, *shape, generator=generator) for shape in (gate, (HEADS,)))
    return [x.requires_grad_() for x in (q, k, v, -g, beta)]


def run_tree(rule: str, tree: RolloutTree, tables: LinearTables, leaves: list, upstream: torch.Tensor) -> torch.Tensor:
    output = RULES[rule][0](*leaves, tables).output
    output.backward(upstream)
    return output


def run_stock(rule: str, paths: list[torch.Tensor], leaves: list, upstreams: list[torch.Tensor]) -> list[torch.Tensor]:
    function = getattr(RULES[rule][1], "__wrapped__", RULES[rule][1])
    outputs = []
    for path, upstream in zip(paths, upstreams, strict=True):
        whole = len(path) == len(leaves[0])
        batched = [(leaf if whole else leaf[path])[None] for leaf in leaves]
        output = function(*batched, use_qk_l2norm_in_kernel=True)[0][0]
        output.backward(upstream)
        outputs.append(output)
    return outputs


def check(rule: str, tree: RolloutTree, mine: torch.Tensor, stock: list, grads: list, stock_grads: list) -> float:
    """Largest difference over outputs and gradients, relative to the largest value of each; exits if too large."""
    worst = max(
        ((mine[torch.from_numpy(tree.path(i))] - alone).abs().max() / alone.abs().max()).item()
        for i, alone in enumerate(stock)
    )
    for one, two in zip(grads, stock_grads, strict=True):
        worst = max(worst, ((one - two).abs().max() / two.abs().max()).item())
    if not worst <= TOLERANCE:
        sys.exit(
            f"{rule}: parity check failed, relative difference {worst:.1e} above {TOLERANCE:.0e}: nothing reported"
        )
    return worst


def timed(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def measure(rule: str, tree: RolloutTree, repeats: int) -> dict:
    tables = LinearTables.build(build_chunk_tree(tree.parent, tree.depth), np.arange(tree.num_tokens))
    paths = [torch.from_numpy(tree.path(index)) for index in range(tree.num_trajectories)]
    generator = torch.Generator().manual_seed(SEED + 1)
    upstreams = [torch.randn(len(path), HEADS, DIM, generator=generator) for path in paths]
    upstream = torch.zeros(tree.num_tokens, HEADS, DIM)
    for path, part in zip(paths, upstreams, strict=True):
        upstream[path] += part
    mine, stock = inputs(rule, tree.num_tokens), inputs(rule, tree.num_tokens)
    # The first run of each is the parity check and the warm-up.
    output = run_tree(rule, tree, tables, mine, upstream)
    outputs = run_stock(rule, paths, stock, upstreams)
    error = check(rule, tree, output, outputs, [x.grad for x in mine], [x.grad for x in stock])
    times: dict[str, list[float]] = {"tree": [], "stock": []}
    for _ in range(repeats):
        times["tree"].append(timed(lambda: run_tree(rule, tree, tables, mine, upstream)))
        times["stock"].append(timed(lambda: run_stock(rule, paths, stock, upstreams)))
    seconds = {name: statistics.median(values) for name, values in times.items()}
    linear_rows = int(tables.lengths.sum())
    per_token = {
        "tree": seconds["tree"] / linear_rows * 1e6,
        "stock": seconds["stock"] / tree.num_expanded_tokens * 1e6,
    }
    return {
        "unique_tokens": tree.num_tokens,
        "expanded_tokens": tree.num_expanded_tokens,
        "linear_rows": linear_rows,
        "relative_difference": error,
        "seconds": seconds,
        "spread": {name: [min(values), max(values)] for name, values in times.items()},
        "microseconds_per_computed_token": per_token,
        "per_token_ratio": per_token["stock"] / per_token["tree"],
        "speedup": seconds["stock"] / seconds["tree"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two repeats and a small tree")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "cpu_linear.json")
    arguments = parser.parse_args()
    repeats = 2 if arguments.quick else 9
    trees = {
        "chain": RolloutTree.from_trajectories([np.arange(1024)]),
        "tree": real_tree(6 if arguments.quick else 24),
    }
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    report = {
        "commit": commit,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "seed": SEED,
        "dtype": "float32",
        "heads": HEADS,
        "head_dim": DIM,
        "repeats": repeats,
        "cases": {},
    }
    for rule in RULES:
        for case, tree in trees.items():
            result = measure(rule, tree, repeats)
            report["cases"][f"{rule}/{case}"] = result
            print(
                f"{rule} {case}: {result['microseconds_per_computed_token']['tree']:.1f} us a computed token, "
                f"stock {result['microseconds_per_computed_token']['stock']:.1f} ({result['per_token_ratio']:.1f}x); "
                f"whole {result['speedup']:.1f}x"
            )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    plot(report["cases"], arguments.out.with_suffix(".png"))


def plot(cases: dict, path: Path) -> None:
    """Microseconds a computed token, ours beside Transformers', for each rule and case."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for side, (name, label) in enumerate((("tree", "harts_hf"), ("stock", "Transformers"))):
        heights = [case["microseconds_per_computed_token"][name] for case in cases.values()]
        bars = axes.bar([position + 0.4 * side for position in range(len(cases))], heights, width=0.4, label=label)
        axes.bar_label(bars, fmt="%.0f")
    axes.set_xticks([position + 0.2 for position in range(len(cases))], list(cases))
    axes.set_yscale("log")
    axes.set_ylabel("CPU microseconds a computed token")
    axes.legend()
    figure.savefig(path, dpi=120)


def processor_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
