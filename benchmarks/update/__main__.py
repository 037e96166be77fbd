"""Optimizer steps of whole models on real shapes, beside the best without sharing and stock TRL.

    export HARTS_COMMIT=$(git rev-parse --short HEAD)
    python -m benchmarks.update run miniswe_b_drop:0-3 anyswe_a --shapes SHAPES --out update.json    # one GPU
    python -m benchmarks.update run --dry-run --shapes SHAPES --out dry.json tot_game24:0            # tiny, on a CPU
    python -m benchmarks.update record update.json more.json    # into benchmarks/results/update_h200.json and a plot

A task is a workload, which of its steps, and a variant; what the result file has already is not run again, and nothing
is begun after ``--seconds``. So a call takes what it can, and the next one goes on; a step of another commit stays in
the file and is run again. Sides that take long run on some
steps of a workload only (`workloads.py`) and are scaled by tokens in its total, which says so. Sizes of baselines are
those that were fastest on the first step of this file or of ``--known``; the tree's microbatch is the smallest of the
budgets that holds the step, or the largest. Before the first step all sides make one on a few trajectories, which
compiles. Steps are timed whatever the parity check says; ``record`` judges and refuses. ``--plant`` runs the first
task's comparison again with a bug of tests/support/planted.py in the tree, so that one sees how far off a bug is.
"""

import argparse
import gc
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pytest import MonkeyPatch
from torch import nn

from benchmarks.gpu import record
from benchmarks.update import tables
from benchmarks.update.merging import merge
from benchmarks.update.models import MODELS, build, skew_routers
from benchmarks.update.workloads import VARIANTS, kinds_of, steps_in, tasks_of
from harts_hf.bench.about import about_machine
from harts_hf.bench.comparing import Comparison
from harts_hf.bench.measure import measure_step
from harts_hf.bench.plot import plot_rows
from harts_hf.bench.report import row_of, table_of
from harts_hf.bench.results import BASELINES, BenchOptions
from harts_hf.bench.rollouts import StepRollouts
from harts_hf.bench.sides import (
    COLLAPSED,
    PACKED,
    STOCK,
    STOCK_KINDS,
    TREE,
    BenchStep,
    Setting,
    build_side,
    common_arguments,
)
from harts_hf.bench.subject import add_lora, word_tokenizer
from harts_hf.modeling import vocab_size_of

WARM_TOKENS = 16384
STEPS_SHOWN = "miniswe_b_drop"
RESULTS = Path(__file__).parents[1] / "results" / "update_h200.json"


def run(options: argparse.Namespace) -> None:
    """Task after task; what each finds is written at once."""
    warnings.simplefilter("ignore", FutureWarning)  # of TRL, for every side
    dry, until = options.dry_run, time.monotonic() + options.seconds
    device = torch.device("cpu" if dry else "cuda")
    # All that may be wrong with the call, before a model is built.
    tasks = tasks_of(options.tasks, options.shapes, dry=dry)
    known = [row for row in rows_in(options.known)["rows"] if "step" in row] if options.known else []
    about = about_machine(device)
    result = going_on(options.out, about)
    record.write(options.out, result)
    model = build(options.model, dry=dry)
    print(f"built {options.model}, {options.seconds - (until - time.monotonic()):.0f} s", flush=True)
    is_warm, last = False, "plain"
    for task in tasks:
        key = {"model": options.model, "workload": task.workload, "step": task.step, "variant": task.variant}
        if any(key.items() <= row.items() and row["commit"] == about["commit"] for row in result["rows"]):
            continue
        if time.monotonic() > until:
            print(f"no time left for {task}", flush=True)
            break
        begun = time.monotonic()
        variant = VARIANTS[task.variant]
        if task.variant != last:
            model = changed(model, variant)
        last = task.variant
        args = common_arguments(
            bf16=not dry, use_cpu=dry, optim=variant.get("optim", "sgd"), dataloader_pin_memory=False,
            activation_checkpointing=variant.get("checkpointing", True),
            activation_checkpointing_kwargs={"use_reentrant": False}, router_aux_loss_coef=0.0,
        )  # fmt: skip
        groups = steps_in(options.shapes, task.workload, dry=dry, variant=task.variant)[task.step]
        rollouts = StepRollouts.of(groups, vocab_size=vocab_size_of(model), labels=variant.get("labels", "recorded"))
        step = BenchStep(
            model=model, rollouts=rollouts, args=args, tokenizer=word_tokenizer(),
            old_log_probs=variant.get("old_log_probs", False),
        )  # fmt: skip
        kinds = tuple(kind for kind in options.sides or kinds_of(task) if kind not in options.leave_out)
        rows = [row for row in (*result["rows"], *known) if row["model"] == options.model and "sides" in row]
        bench = BenchOptions(
            budgets=tuple(options.budgets), batch_sizes=tuple(options.batch_sizes),
            slice_rows=tuple(options.slice_rows), kinds=kinds,
            steps=options.steps,
            steps_of={**dict.fromkeys(BASELINES, options.baseline_steps), **dict.fromkeys(STOCK_KINDS, 1)},
            seconds_per_side=options.max_seconds, baseline_elsewhere=kinds == (TREE,),
            parity_tokens=options.parity_tokens, times_anyway=True,
            own_routes=not result["rows"], stages_when_tried=options.stages_when_tried,
            once_above=options.once_above, **known_of(rows, rollouts.tree.num_tokens, options.budgets),
        )  # fmt: skip
        try:
            if not is_warm:
                every = {kind for one in tasks for kind in options.sides or kinds_of(one)} - set(options.leave_out)
                warm_up(replace(step, rollouts=rollouts.part(WARM_TOKENS)), every, min(options.budgets))
                is_warm = True
            measured = measure_step(step, bench, progress=said_since(begun))
            row = row_of(measured, **key, commit=about["commit"])
            result["rows"].append(row)
            result["failures"].pop(" ".join(map(str, key.values())), None)
            print(table_of(row), flush=True)
            for name in options.plant if len(result["rows"]) == 1 else ():
                with planted_bug(name):
                    part = replace(step, rollouts=rollouts.part(bench.parity_tokens), old_log_probs=False)
                    comparison = Comparison(part, progress=said_since(begun))
                    wrong = comparison.verdict([], max(bench.budgets), torch.bfloat16)
                result["planted"][name] = {**key, "parity": wrong.to_dict()}
        except Exception:
            result["failures"][" ".join(map(str, key.values()))] = record.failure()
        record.write(options.out, result)
        model.zero_grad(set_to_none=True)
        gc.collect()
        if not dry:
            torch.cuda.empty_cache()


def rows_in(path: Path) -> dict[str, Any]:
    """A result file of this benchmark.

    Raises:
        SystemExit: there is none, or it is something else.
    """
    try:
        found = record.read(path)
        if all(isinstance(row["sides"], dict) and row["model"] for row in found["rows"] if "steps" not in row):
            return found
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"expected a result file of `benchmarks.update run`, got {path}: {error!r}") from error
    raise SystemExit(f"expected a result file of `benchmarks.update run`, got {path}: rows without sides")


def going_on(path: Path, about: dict[str, Any]) -> dict[str, Any]:
    """What a file holds already; steps of other commits stay in it, each with its commit, and are run again."""
    if not path.exists():
        return {**about, "failures": {}, "rows": [], "planted": {}}
    old = rows_in(path)
    rows = [{**row, "commit": row.get("commit", old["commit"])} for row in old["rows"]]
    return {**about, "failures": old.get("failures", {}), "rows": rows, "planted": old.get("planted", {})}


def changed(model: Any, variant: dict[str, Any]) -> nn.Module:
    """The model for a variant, without the adapters of one before; skewed for good, so such variants come last."""
    if hasattr(model, "peft_config"):
        model = model.unload()
        model.requires_grad_(True)
    if variant.get("skew"):
        skew_routers(model, variant["skew"])
    return add_lora(model, variant["lora"]) if variant.get("lora") else model


@contextmanager
def planted_bug(name: str) -> Iterator[None]:
    """Inside, the tree has a bug."""
    from support import planted  # of tests/

    with MonkeyPatch.context() as patch:
        getattr(planted, name)(patch)
        yield


def warm_up(step: BenchStep, kinds: set[str], size: int) -> None:
    """A step of every side on a few trajectories, for what is compiled."""
    begun = time.monotonic()
    # Sorting and collapsing compile nothing of their own.
    for kind in (kind for kind in (STOCK, PACKED, TREE) if kind in kinds):
        side = build_side(Setting(kind=kind, size=1 if kind in STOCK_KINDS else size), step)
        side.step()
        print(f"{kind} is warm, {time.monotonic() - begun:.0f} s", flush=True)


def known_of(rows: Sequence[dict[str, Any]], unique_tokens: int, budgets: Sequence[int]) -> dict[str, Any]:
    """What earlier steps of a model say of a later one: sizes, and seconds of a microbatch whatever is in it."""
    if not rows:
        return {}
    sizes: dict[str, int] = {}
    for row in rows:  # the first that has a side has tried all its sizes
        for kind, side in row["sides"].items():
            sizes.setdefault(kind, int(side["setting"].rsplit(" ", 1)[1].partition("/")[0]))
    if PACKED in sizes:
        sizes.setdefault(COLLAPSED, sizes[PACKED])
    sizes[TREE] = next((budget for budget in sorted(budgets) if budget >= unique_tokens), max(budgets))
    constants = next((row["microbatch_seconds"] for row in rows if row.get("microbatch_seconds")), {})
    return {"fixed": sizes, "microbatch_seconds": constants}


def written(merged: dict[str, Any]) -> tuple[str, ...]:
    """The tables of docs/performance.md."""
    return (
        *tables.TOTALS, *tables.totals(merged), "", *tables.OTHERS, *tables.others(merged), "",
        *tables.STEPS, *tables.steps(merged, STEPS_SHOWN),
    )  # fmt: skip


def said_since(begun: float) -> Callable[[str], None]:
    """Says what is done, and since when."""
    return lambda text: print(f"{time.monotonic() - begun:.0f} s: {text}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs tasks, or records what they found."""
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="runs tasks")
    runs.add_argument("tasks", nargs="+", metavar="WORKLOAD[:FIRST[-LAST]][@VARIANT]")
    runs.add_argument("--model", choices=MODELS, default="ling-3.0-tiny")
    runs.add_argument("--sides", nargs="+", help="in place of those that the workload says")
    runs.add_argument("--leave-out", nargs="+", default=[], help="sides that are not run")
    runs.add_argument("--budgets", type=int, nargs="+", default=[16384, 32768, 65536, 98304], help="of a microbatch")
    runs.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2], help="of stock trainers")
    runs.add_argument("--slice-rows", type=int, nargs="+", default=[], help="of a batch of the others (default: many)")
    runs.add_argument("--shapes", type=Path, required=True)
    runs.add_argument("--out", type=Path, required=True)
    runs.add_argument("--steps", type=int, default=5)
    runs.add_argument("--known", type=Path, help="a result file whose sizes of baselines are taken")
    runs.add_argument("--plant", nargs="+", default=[], help="bugs of tests/support/planted.py (tests on PYTHONPATH)")
    runs.add_argument("--baseline-steps", type=int, default=5, help="(a stock trainer has one)")
    runs.add_argument("--stages-when-tried", action="store_true", help="of baselines: a step less of each")
    runs.add_argument("--once-above", type=float, default=float("inf"), help="seconds; so long ones are timed then")
    runs.add_argument("--parity-tokens", type=int, default=32768, help="mixtures of experts are compared on")
    runs.add_argument("--seconds", type=float, default=540.0, help="of the call")
    runs.add_argument("--max-seconds", type=float, default=60.0, help="of a side's timed steps")
    runs.add_argument("--dry-run", action="store_true")
    records = commands.add_parser("record", help="merges result files into the record and draws it")
    records.add_argument("parts", type=Path, nargs="*", help="(default: the record is judged and added up anew)")
    records.add_argument("--record", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    if options.command == "run":
        run(options)
        return
    old = rows_in(options.record) if options.parts == [] or options.record.exists() else {}
    merged = merge([rows_in(part) for part in options.parts], old)
    record.write(options.record, merged)
    drawn = ("plain", *tables.SEVERAL)
    steps = [row for row in merged["rows"] if "step" in row and row["model"] == tables.MODEL]
    steps = [row for row in steps if row["variant"] in drawn]
    steps.sort(key=lambda row: (len(row["sides"]), row["tokens"]))  # the last is drawn by phase
    print("\n".join(written(merged)))
    plot_rows(steps, options.record.with_suffix(".png"), merged["device"])


if __name__ == "__main__":
    main()
