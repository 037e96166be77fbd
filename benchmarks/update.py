"""Optimizer steps of whole models on real shapes, beside the best without sharing and stock TRL.

    export HARTS_COMMIT=$(git rev-parse --short HEAD)
    python -m benchmarks.update run miniswe_b_drop:0-3 anyswe_a --shapes SHAPES --out update.json    # one GPU
    python -m benchmarks.update run --dry-run --shapes SHAPES --out dry.json tot_game24:0            # tiny, on a CPU
    python -m benchmarks.update record update.json more.json    # into benchmarks/results/update_h200.json and a plot

A task is a workload and which of its steps; what the result file has already is not run again, and nothing is begun
that may not end within ``--seconds``. So a call takes what it can, and the next one goes on. Sides that take long run
on some steps of a workload only (:data:`WORKLOADS`) and are scaled by tokens in its total, which says so.
"""

import argparse
import gc
import json
import os
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu import record
from benchmarks.gpu.registry import STEP_MODELS, TINY
from harts_hf.bench.about import about_machine
from harts_hf.bench.measure import BenchOptions, measure_step
from harts_hf.bench.plot import plot_rows
from harts_hf.bench.report import row_of, table_of, total_of
from harts_hf.bench.rollouts import StepRollouts, steps_of
from harts_hf.bench.sides import COLLAPSED, PACKED, SORTED, STOCK, TREE, common_arguments
from harts_hf.bench.subject import add_lora, word_tokenizer
from harts_hf.modeling import vocab_size_of
from harts_hf.rollouts.files import read_rollouts
from harts_hf.rollouts.recorded import RolloutGroup
from harts_hf.rollouts.shapes import shape_group

RESULTS = Path(__file__).parent / "results" / "update_h200.json"
DRY_LAYERS, DRY_LENGTH, DRY_ROWS = 4, 12, 4
_PERIOD_OF_4 = ["linear_attention"] * 3 + ["full_attention"]
MODELS = {
    **STEP_MODELS,
    "qwen3.5-moe-8b": ("qwen3_5_moe_text", {
        "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1, "vocab_size": 248320, "hidden_size": 2048,
        "num_hidden_layers": 20, "layer_types": _PERIOD_OF_4 * 5, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 384,
        "shared_expert_intermediate_size": 512, "router_aux_loss_coef": 0.0,
    }),
}  # fmt: skip
DRY_EXPERTS = {"num_local_experts": 8, "num_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2}


class Workload(NamedTuple):
    """A shape file: groups to a step, and the steps on which sides without sharing, and stock trainers, run."""

    groups_per_step: int = 1
    unshared: tuple[int, ...] | None = None
    stock: tuple[int, ...] = (0,)


WORKLOADS = {
    "miniswe_b_drop": Workload(1, unshared=(0, 1, 2, 3), stock=(0,)),
    "tau_airline_b": Workload(5, unshared=(0,)),
    "nemo_qwen3think_b_drop": Workload(5),
    "tot_game24": Workload(25, unshared=(0, 1)),
    "vmcts_dafny_bst": Workload(10),
    "anyswe_a": Workload(4),
    "tau_airline_a": Workload(25),
}
# Beside the plain step: SGD, full parameters, recorded labels, no old log-probs.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "old-log-probs": {"old_log_probs": True},
    "adamw": {"optim": "adamw_torch_fused"},
    "lora": {"lora": 16},
    "all-labels": {"labels": "all"},
    "skewed": {"skew": 1.0},
    "kept": {"checkpointing": False},
}


def build(name: str, *, dry: bool) -> nn.Module:
    """Random weights, in bf16 on the GPU; if ``dry``, few and tiny layers in float32 on the CPU."""
    family, whole = MODELS[name]
    torch.manual_seed(0)
    if dry:
        small = {key: value for key, value in {**TINY, **DRY_EXPERTS, "vocab_size": 512}.items() if key in whole}
        layers = {"num_hidden_layers": DRY_LAYERS, "layer_types": whole["layer_types"][:DRY_LAYERS]}
        config = AutoConfig.for_model(family, **{**whole, **small, **layers})
        return AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(family, **whole), dtype=torch.bfloat16, attn_implementation="sdpa"
        )


def skew_routers(model: nn.Module, deviation: float) -> None:
    """Scales each expert's row of every router by a log-normal number, so that some are chosen far more often."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if "Router" in type(module).__name__ and isinstance(getattr(module, "weight", None), nn.Parameter):
            scale = torch.randn(len(module.weight), generator=generator).mul(deviation).exp()
            module.weight.data.mul_(scale.to(module.weight)[:, None])


def groups_of(shapes: Path, name: str, *, dry: bool) -> list[RolloutGroup]:
    """Of a shape file; if ``dry``, with a few short trajectories each."""
    path = shapes / f"{name}.jsonl.gz"
    if not dry:
        return read_rollouts(path)
    import gzip

    with gzip.open(path, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    return [
        shape_group(
            {
                "parent": row["parent"],
                "length": [min(length, DRY_LENGTH) for length in row["length"]],
                "sample_node": row["sample_node"][:DRY_ROWS],
            },
            str(row["group"]),
        )
        for row in map(_pruned, rows)
    ]


def _pruned(row: dict[str, Any]) -> dict[str, Any]:
    """Without the nodes that no kept trajectory passes."""
    kept: set[int] = set()
    for node in row["sample_node"][:DRY_ROWS]:
        while node >= 0 and node not in kept:
            kept.add(node)
            node = row["parent"][node]
    number = {node: index for index, node in enumerate(sorted(kept))}
    return {
        "group": row["group"],
        "parent": [number.get(row["parent"][node], -1) for node in sorted(kept)],
        "length": [row["length"][node] for node in sorted(kept)],
        "sample_node": [number[node] for node in row["sample_node"][:DRY_ROWS]],
    }


def steps_in(shapes: Path, name: str, *, dry: bool) -> list[list[RolloutGroup]]:
    """The groups of each step of a workload; if ``dry``, one to a step."""
    return steps_of(groups_of(shapes, name, dry=dry), 1 if dry else WORKLOADS[name].groups_per_step)


class Task(NamedTuple):
    """One step of a workload."""

    workload: str
    step: int


def tasks_of(words: Sequence[str], shapes: Path, *, dry: bool) -> list[Task]:
    """``NAME``, ``NAME:3`` or ``NAME:0-3``, of any number of workloads."""
    found = []
    for word in words:
        name, _, steps = word.partition(":")
        if name not in WORKLOADS:
            raise SystemExit(f"expected a workload of {', '.join(WORKLOADS)}, got {name!r}")
        count = len(steps_in(shapes, name, dry=dry))
        first, _, last = steps.partition("-")
        chosen = range(int(first), int(last or first) + 1) if steps else range(count)
        if chosen and not 0 <= chosen[0] <= chosen[-1] < count:
            raise SystemExit(f"expected steps of {name} from 0 to {count - 1}, got {steps}")
        found += [Task(name, step) for step in chosen]
    return found


def kinds_of(task: Task) -> tuple[str, ...]:
    """Sides that run in a step; the tree without another one where they are sampled elsewhere."""
    workload = WORKLOADS[task.workload]
    unshared = workload.unshared is None or task.step in workload.unshared
    stock = task.step in workload.stock
    return (*((STOCK, SORTED) if stock else ()), *((PACKED, COLLAPSED) if unshared else ()), TREE)


def run(options: argparse.Namespace) -> None:
    """Task after task; what each finds is written at once."""
    warnings.simplefilter("ignore", FutureWarning)  # of TRL, for every side
    dry, until = options.dry_run, time.monotonic() + options.seconds
    variant = VARIANTS[options.variant]
    device = torch.device("cpu" if dry else "cuda")
    model = build(options.model, dry=dry)
    if variant.get("skew"):
        skew_routers(model, variant["skew"])
    if variant.get("lora"):
        model = add_lora(model, variant["lora"])
    print(f"built {options.model}, {options.seconds - (until - time.monotonic()):.0f} s", flush=True)
    about = about_machine(device)
    result = record.read(options.out) if options.out.exists() else {}
    if result.get("commit") != about["commit"]:
        result = {**about, "failures": {}, "rows": []}
    args = common_arguments(
        bf16=not dry, use_cpu=dry, optim=variant.get("optim", "sgd"), dataloader_pin_memory=False,
        activation_checkpointing=variant.get("checkpointing", True),
        activation_checkpointing_kwargs={"use_reentrant": False}, router_aux_loss_coef=0.0,
    )  # fmt: skip
    fixed: dict[str, dict[str, int]] = {}
    took = 0.0
    for task in tasks_of(options.tasks, options.shapes, dry=dry):
        key = {"model": options.model, "workload": task.workload, "step": task.step, "variant": options.variant}
        if any(key.items() <= row.items() for row in result["rows"]):
            continue
        if time.monotonic() + 1.5 * took > until:
            print(f"no time left for {task}", flush=True)
            break
        begun = time.monotonic()
        groups = steps_in(options.shapes, task.workload, dry=dry)[task.step]
        rollouts = StepRollouts.of(groups, vocab_size=vocab_size_of(model), labels=variant.get("labels", "recorded"))
        kinds = options.sides or kinds_of(task)
        if PACKED not in kinds and STOCK not in kinds:
            kinds = (PACKED, *kinds)  # something has to be compared with
        bench = BenchOptions(
            budgets=tuple(options.budgets), batch_sizes=tuple(options.batch_sizes), kinds=tuple(kinds),
            steps=options.steps, seconds_per_side=options.max_seconds, fixed=fixed.get(task.workload, {}),
            old_log_probs=variant.get("old_log_probs", False),
        )  # fmt: skip
        try:
            measured = measure_step(
                model, rollouts, args, word_tokenizer(), bench, progress=lambda text: print(text, flush=True)
            )
            row = row_of(measured, **key)
            fixed[task.workload] = {kind: side.setting.size for kind, side in measured.sides.items()}
            result["rows"].append(row)
            print(table_of(row), flush=True)
        except Exception:
            result["failures"][f"{options.model} {options.variant} {task.workload} {task.step}"] = record.failure()
        record.write(options.out, result)
        model.zero_grad(set_to_none=True)
        gc.collect()
        if not dry:
            torch.cuda.empty_cache()
        took = time.monotonic() - begun


def merge(parts: Sequence[dict[str, Any]], old: dict[str, Any]) -> dict[str, Any]:
    """Steps of several calls, each as measured last, and a total of each workload and variant behind them.

    Raises:
        SystemExit: a step whose parity check failed.
    """
    names = ("model", "workload", "step", "variant")
    steps = {tuple(row[name] for name in names): row for row in old.get("rows", ()) if "step" in row}
    for part in parts:
        for row in part["rows"]:
            if not row["parity"]["passed"]:
                raise SystemExit(f"refused: {row['workload']} {row['step']}: {row['parity']['failures']}")
            steps[tuple(row[name] for name in names)] = {**row, "commit": part["commit"]}
    by_workload: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for (model, workload, _, variant), row in sorted(steps.items(), key=lambda item: str(item[0])):
        by_workload.setdefault((model, workload, variant), []).append(row)
    totals = [
        {**total_of(rows), "variant": variant, "commits": sorted({row["commit"] for row in rows})}
        for (_, _, variant), rows in by_workload.items()
    ]
    last = parts[-1]
    return {
        "device": last["device"],
        "versions": last["versions"],
        "commit": last["commit"],
        "failures": {key: value for part in parts for key, value in part["failures"].items()},
        "rows": [*totals, *(row for rows in by_workload.values() for row in rows)],
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Runs tasks, or records what they found."""
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="runs tasks")
    runs.add_argument("tasks", nargs="+", metavar="WORKLOAD[:FIRST[-LAST]]")
    runs.add_argument("--model", choices=MODELS, default="ling-3.0-tiny")
    runs.add_argument("--variant", choices=VARIANTS, default="plain")
    runs.add_argument("--sides", nargs="+", help="in place of those that the workload says")
    runs.add_argument("--budgets", type=int, nargs="+", default=[16384, 32768, 65536], help="tokens of a microbatch")
    runs.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 4], help="of stock trainers")
    runs.add_argument("--shapes", type=Path, required=True)
    runs.add_argument("--out", type=Path, required=True)
    runs.add_argument("--steps", type=int, default=5)
    runs.add_argument("--seconds", type=float, default=540.0, help="of the call")
    runs.add_argument("--max-seconds", type=float, default=60.0, help="of a side's timed steps")
    runs.add_argument("--dry-run", action="store_true")
    records = commands.add_parser("record", help="merges result files into the record and draws it")
    records.add_argument("parts", type=Path, nargs="+")
    records.add_argument("--record", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    if options.command == "run":
        run(options)
        return
    old = record.read(options.record) if options.record.exists() else {}
    merged = merge([record.read(part) for part in options.parts], old)
    record.write(options.record, merged)
    steps = [row for row in merged["rows"] if "step" in row]
    plot_rows(steps, options.record.with_suffix(".png"), merged["device"])


if __name__ == "__main__":
    main()
