"""Times linear-attention layers on trees against stock FLA on the expanded trajectories.

Efficiency is stage by stage: the baseline's time of the rule over the ratio of chunk nodes, plus its time of all else
over the ratio of rows, divided by the tree's time. The result says whether the parity check beside it passed; the
record refuses it otherwise.
"""

import argparse
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.gpu import record
from benchmarks.gpu.compare import cu_seqlens
from benchmarks.gpu.linear.layers import LinearLayer, Mixer, expanded_mixer, make_layer, pin_norm, tree_mixer
from benchmarks.gpu.measure import kernels, median_ms, peak_bytes
from benchmarks.gpu.registry import SEED
from benchmarks.gpu.trees import Forest, batches, fork_layout, named_forest
from harts_hf.kernels.linear_attention.fla_tables import packed_chains

PROFILED = ("nested-16K-15/16", "tot_game24")


def step(layer: LinearLayer, mixer: Mixer, tokens: int) -> Callable[[], object]:
    """A closure that runs the layer forward and backward on fixed random rows."""
    hidden = layer.in_proj_qkv.in_features
    x = torch.randn(tokens, hidden, device="cuda").bfloat16().requires_grad_()
    dy = torch.randn(tokens, hidden, device="cuda").bfloat16()
    leaves = [x, *layer.parameters()]
    return lambda: torch.autograd.grad(layer(x, mixer), leaves, dy)


def rule_step(layer: LinearLayer, mixer: Mixer, tokens: int) -> Callable[[], object]:
    """A closure that runs the rule alone, from the convolution's output on, forward and backward."""
    with torch.no_grad():
        x = torch.randn(tokens, layer.in_proj_qkv.in_features, device="cuda").bfloat16()
        g, beta, _ = layer.gates(x)
        mixed = torch.randn(tokens, layer.in_proj_qkv.out_features, device="cuda").bfloat16()
    leaves = [mixed.requires_grad_(), g.detach().requires_grad_(), beta.detach().requires_grad_()]
    dy = torch.randn(tokens, layer.value_heads, layer.dim, device="cuda").bfloat16()
    rule = layer.rule(mixer)
    return lambda: torch.autograd.grad(rule(*layer.split(mixed), *leaves[1:]), leaves, dy)


def conv_step(layer: LinearLayer, mixer: Mixer, tokens: int) -> Callable[[], object]:
    """A closure that runs the convolution alone, forward and backward."""
    x = torch.randn(tokens, layer.in_proj_qkv.out_features, device="cuda").bfloat16().requires_grad_()
    dy = torch.randn_like(x)
    return lambda: torch.autograd.grad(mixer.conv(x, layer.conv_weight), [x, layer.conv_weight], dy)


def time_baseline(layer: LinearLayer, forest: Forest) -> dict[str, float]:
    """Milliseconds of the layer, the rule and the convolution, summed over batches; equal batches are timed once."""
    total = {"layer": 0.0, "rule": 0.0, "conv": 0.0}
    known: dict[tuple, dict[str, float]] = {}
    for lengths in batches(forest.lengths):
        key = tuple(lengths.tolist())
        if key not in known:
            mixer, tokens = expanded_mixer(cu_seqlens(lengths)), int(lengths.sum())
            known[key] = {
                name: median_ms(make(layer, mixer, tokens), 3, 1)
                for name, make in (("layer", step), ("rule", rule_step), ("conv", conv_step))
            }
        for name in total:
            total[name] += known[key][name]
    return total


def measure(layer: LinearLayer, kind: str, name: str, forest: Forest) -> list[dict]:
    """The rows of a layer and of its convolution."""
    mixer, rows = tree_mixer(forest), forest.num_rows
    tree = median_ms(step(layer, mixer, rows), 5, 2)
    rule = median_ms(rule_step(layer, mixer, rows), 3, 1)
    tree_conv = median_ms(conv_step(layer, mixer, rows), 3, 1)
    baseline = time_baseline(layer, forest)
    tables = forest.linear_tables().to("cuda")
    ratio, chunk_ratio = forest.ratio, forest.expanded_chunks / tables.num_nodes
    ideal = baseline["rule"] / chunk_ratio + (baseline["layer"] - baseline["rule"]) / ratio
    memory = peak_bytes(step(layer, mixer, rows))
    quarter = np.diff(np.linspace(0, rows, 5).astype(np.int64))
    memory_baseline = peak_bytes(step(layer, expanded_mixer(cu_seqlens(quarter)), rows))
    groups = len(packed_chains(tables, torch.zeros(0, dtype=torch.int64), 0).groups)
    shared = {"layout": name, "kind": kind, "ratio": ratio, "chunk_ratio": chunk_ratio, "rows": rows, "groups": groups}
    result = [
        {
            "op": "linear",
            **shared,
            "tree_ms": tree,
            "baseline_ms": baseline["layer"],
            "speedup": baseline["layer"] / tree,
            "efficiency": ideal / tree,
            "rule_ms": rule,
            "baseline_rule_ms": baseline["rule"],
            "rule_efficiency": baseline["rule"] / chunk_ratio / rule,
            "peak_bytes": memory,
            "peak_bytes_baseline_on_unique": memory_baseline,
        },
        {
            "op": "conv",
            **shared,
            "tree_ms": tree_conv,
            "baseline_ms": baseline["conv"],
            "speedup": baseline["conv"] / tree_conv,
            "efficiency": baseline["conv"] / ratio / tree_conv,
        },
    ]
    first = result[0]
    print(
        f"{kind:10} {name:24} ratio {ratio:5.2f}/{chunk_ratio:5.2f} tree {tree:7.2f} base {baseline['layer']:8.2f} "
        f"speedup {first['speedup']:5.2f} eff {first['efficiency']:.3f} rule {rule:6.2f} eff "
        f"{first['rule_efficiency']:.3f} conv {tree_conv:.2f} eff {result[1]['efficiency']:.3f} "
        f"mem {memory / max(memory_baseline, 1):.2f}",
        flush=True,
    )
    return result


def launches(layer: LinearLayer) -> dict[str, int]:
    """Kernels of one forward and backward with 8 and with 128 branches."""
    counts = {}
    for branches in (8, 128):
        forest = fork_layout(4096 + 5, branches, 4096 // branches + 1)
        counts[str(branches)] = sum(count for _, count, _ in kernels(step(layer, tree_mixer(forest), forest.num_rows)))
    return counts


def show_kernels(layer: LinearLayer, forest: Forest, label: str) -> None:
    """Prints the slowest kernels of the tree and of the baseline's first batch."""
    lengths = batches(forest.lengths)[0]
    for name, run in (
        ("tree", step(layer, tree_mixer(forest), forest.num_rows)),
        ("baseline", step(layer, expanded_mixer(cu_seqlens(lengths)), int(lengths.sum()))),
    ):
        rows = kernels(run)
        print(f"-- {label} {name}: {sum(r[2] for r in rows):.2f} ms, {sum(r[1] for r in rows)} launches", flush=True)
        for key, count, ms in rows[:26]:
            print(f"   {ms:7.3f} ms {count:4d} {key[:90]}")


def main(options: argparse.Namespace) -> None:
    """Layouts of every kind, then launches and kernels of every kind."""
    passes = options.parity.exists() and record.read(options.parity)["passes"]
    if not passes:
        print("the parity check failed: figures below are for diagnosis, not for the record", flush=True)
    pin_norm()
    forests = {name: named_forest(options.shapes, name) for name in {*options.layouts, *PROFILED}}
    rows = record.Rows(options.out, {"parity_passes": passes, "launches": {}})
    for kind in options.kinds:
        layer = make_layer(kind, seed=SEED)
        for name in options.layouts:
            rows.add(f"{kind} {name}", lambda name=name: measure(layer, kind, name, forests[name]))  # noqa: B023
        rows.result["launches"][kind] = rows.earlier.get("launches", {}).get(kind) or launches(layer)
        rows.save()
        print(kind, "launches by branches", rows.result["launches"][kind], flush=True)
        for name in PROFILED:
            show_kernels(layer, forests[name], f"{kind} {name}")
