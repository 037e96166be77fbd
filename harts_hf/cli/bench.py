"""`harts bench`: an optimizer step through real trainers: stock TRL, the best without sharing, the tree.

harts bench --model M ROLLOUTS [--json out.json] [--plot out.png]
harts bench RECIPE [--field value ...]              the recipe's model and arguments, on rollouts that it collects once
harts bench --fit-cost --model M --out cost.json    fits the planner's cost model to this machine
"""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harts_hf.cli.bench_arguments import STEPS_MEASURED, build_parser
from harts_hf.cli.checks import (
    check_output_file,
    check_picture,
    find_device,
    refuse_same_output,
    refuse_to_overwrite,
)
from harts_hf.cli.loading import (
    check_token_ids,
    is_random,
    load_model,
    load_tokenizer,
    read_rollouts,
    refuse_left_over,
    summary,
    tokenizer_name,
    tokenizer_on_demand,
)
from harts_hf.cli.output import printable, printable_lines, replacing, write_json
from harts_hf.names import check_model_name
from harts_hf.planner.text import counted

if TYPE_CHECKING:
    from harts_hf.bench.results import BenchOptions
    from harts_hf.bench.subject import Subject


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit status: 1 where the sides did not train the same."""
    if any(word.split("=")[0] == "--fit-cost" for word in argv):
        from harts_hf.cli.bench_cost import main as fit_cost

        return fit_cost(argv)
    parser = build_parser(__doc__)
    options, fields = parser.parse_known_args(argv)
    if options.model is not None:
        refuse_left_over(parser, options, fields)
    return 0 if _run(options, fields) else 1


def _run(options: argparse.Namespace, fields: Sequence[str]) -> bool:
    inputs = (options.rollouts, options.model, options.tokenizer, options.cost)
    refuse_to_overwrite(options.json, *inputs)
    refuse_to_overwrite(options.plot, *inputs)
    refuse_same_output("--plot", options.plot, "--json", options.json)
    check_output_file("--json", options.json)
    check_picture("--plot", options.plot)
    # One growing segment per stream instead of blocks that only fit one side's sizes; read when CUDA starts.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    _check_one_process()
    device = find_device(options.device)
    if options.groups_per_step < 1:
        raise ValueError(f"expected at least one group per step, got {options.groups_per_step}")
    if options.max_groups is not None and options.max_groups < 1:
        raise ValueError(f"expected at least one group, got {options.max_groups}")

    from harts_hf.bench.about import about_machine
    from harts_hf.bench.results import BenchOptions

    bench = BenchOptions(
        budgets=tuple(options.budgets), batch_sizes=tuple(options.batch_sizes), kinds=tuple(options.sides),
        slice_rows=tuple(options.slice_rows), steps=options.steps, seconds_per_side=options.max_seconds,
    )  # fmt: skip
    if options.model is None:
        if Path(options.rollouts).suffix not in (".yaml", ".yml"):
            raise ValueError(
                f"expected --model with a rollout file, or a recipe (.yaml), got {options.rollouts!r} alone"
            )
        from harts_hf.cli.bench_recipe import subject_of_recipe

        subject = subject_of_recipe(options, fields, device)
    else:
        subject = _subject(options, device)
    about = {**about_machine(next(subject.model.parameters()).device), "command": subject.about}
    print("\n".join(f"{name}: {printable(value)}" for name, value in about.items() if name != "versions"), flush=True)
    return _measure(options, subject, bench, about)


def _check_one_process() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"expected one process, got WORLD_SIZE={os.environ['WORLD_SIZE']}: several GPUs are measured by "
            "`python -m benchmarks.ranks` (docs/ranks.md)"
        )


def _subject(options: argparse.Namespace, device: Any) -> "Subject":
    """What `--model M ROLLOUTS` names."""
    import torch

    from harts_hf.bench.sides import common_arguments
    from harts_hf.bench.subject import Subject, add_lora, word_tokenizer
    from harts_hf.cli.checks import picked

    check_model_name("--model", options.model)
    name = tokenizer_name(options)
    file = read_rollouts(options, tokenizer_on_demand(name))
    check_token_ids(file, options.model)
    needs_texts = options.tokenizer is not None or file.num_conversations
    tokenizer = load_tokenizer(name) if name is not None and needs_texts else None
    if tokenizer is not None and tokenizer.pad_token is None and tokenizer.eos_token is None:
        raise ValueError(
            f"expected a tokenizer with a pad or an end token, by which TRL pads rows, got {name!r} without"
        )
    if file.num_conversations:
        print(f"rollouts: {summary(file)}; {counted(len(file.groups), 'group')}", flush=True)
    groups = picked(file.groups, options.groups, options.max_groups or STEPS_MEASURED * options.groups_per_step)
    dtype = getattr(torch, options.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    # Where the model is trained: random weights of billions of parameters take minutes on a CPU.
    with torch.device(device):
        model = load_model(options.model, dtype, seed=options.seed, random_weights=options.random_weights).to(device)
    if options.lora is not None:
        model = add_lora(model, options.lora)
    args = common_arguments(
        bf16=dtype == torch.bfloat16, use_cpu=device.type == "cpu", optim=options.optim, seed=options.seed,
        activation_checkpointing=options.checkpointing,
        activation_checkpointing_kwargs={"use_reentrant": False} if options.checkpointing else None,
        dataloader_pin_memory=False, tree_cost=options.cost, router_aux_loss_coef=0.0,
    )  # fmt: skip
    return Subject(
        model=model,
        groups=groups,
        args=args,
        tokenizer=tokenizer or word_tokenizer(),
        name=os.path.basename(os.path.normpath(options.model)),
        workload=os.path.basename(options.rollouts).split(".")[0],
        about=_in_words(options, str(dtype).removeprefix("torch.")),
    )


def _in_words(options: argparse.Namespace, dtype: str) -> str:
    weights = " (random weights)" if options.random_weights or is_random(options.model) else ""
    checkpointing = f"checkpointing {'on' if options.checkpointing else 'off'}"
    adapters = [] if options.lora is None else [f"LoRA of rank {options.lora}"]
    scored = ["old log-probs scored in each step"] if options.old_log_probs else []
    return ", ".join([f"{options.model}{weights}", dtype, options.optim, checkpointing, *adapters, *scored])


def _measure(options: argparse.Namespace, subject: "Subject", bench: "BenchOptions", about: dict[str, Any]) -> bool:
    from harts_hf.bench.measure import measure_step
    from harts_hf.bench.plot import plot_rows
    from harts_hf.bench.progress import Progress, guess_of_step, in_words, size_in_words
    from harts_hf.bench.report import NOTES, row_of, table_of, total_of
    from harts_hf.bench.rollouts import steps_of
    from harts_hf.modeling import find_routers

    rows: list[dict[str, Any]] = []
    result = {**about, "notes": NOTES, "sampling_seconds": subject.sampling_seconds, "rows": rows}

    def say(text: str) -> None:
        print(f"harts bench: {text}", file=sys.stderr, flush=True)

    steps = steps_of(subject.groups, options.groups_per_step)
    for number, groups in enumerate(steps, 1):
        step = subject.step(groups, seed=options.seed, labels=options.labels, old_log_probs=options.old_log_probs)
        guess, routed = guess_of_step(step.model, step.rollouts), bool(find_routers(step.model))
        progress = Progress(bench, step.rollouts, say, guess, routed=routed)
        say(f"the step of {counted(len(groups), 'group')} ({number} of {len(steps)}): {size_in_words(step.rollouts)}")
        say(
            f"up to {progress.num_steps} runs of it, very roughly {in_words(progress.seconds_left)} "
            "(fewer --sides, --batch-sizes, --budgets, --steps take less)"
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of TRL and Transformers, again for every side
            measured = measure_step(step, bench, progress=progress)
        row = row_of(measured, model=subject.name, workload=subject.workload, old_log_probs=step.old_log_probs)
        rows.append(row)
        print(f"\n{printable_lines(table_of(row))}", flush=True)
        if options.json:
            write_json(options.json, result)  # what is there, should the next step be ended
    passed = all(row["parity"]["passed"] for row in rows)
    if passed and len(rows) > 1:
        result["total"] = total_of(rows)
        print(f"\n{total_line(result['total'])}")
    if passed and subject.sampling_seconds is not None:
        print(f"\n{sampling_line(rows, subject.sampling_seconds)}")
    print("\n" + "\n".join(NOTES))
    if options.json:
        write_json(options.json, result)
        print(f"wrote {printable(options.json)}")
    if options.plot and passed:
        with replacing(options.plot) as new:
            plot_rows(rows, new, f"{subject.name}, {about['device']}")
        print(f"wrote {printable(options.plot)}")
    return passed


def total_line(total: dict[str, Any]) -> str:
    """All steps together, in a line."""
    gains = [
        f"{total[key]:.2f}x {over}"
        for key, over in (
            ("speedup_stock", "stock TRL"),
            ("speedup", "the same kernels without sharing"),
            ("speedup_collapsed", "that with nested prefixes collapsed"),
        )
        if key in total
    ]
    efficiency = f", efficiency {total['efficiency']:.2f}" if "efficiency" in total else ""
    return (
        f"all {total['steps']} steps ({total['tokens']:,} tokens, ratio {total['sharing_ratio']:.2f}): "
        f"{', '.join(gains)}{efficiency}"
    )


def sampling_line(rows: Sequence[dict[str, Any]], sampling: float) -> str:
    """What a step gains whose sampling took so long."""
    tree = sum(row["seconds"] for row in rows)
    gains = [
        f"{(sampling + sum(row[f'{name}_seconds'] for row in rows)) / (sampling + tree):.2f}x {over}"
        for name, over in (("stock", "stock TRL"), ("baseline", "the same kernels without sharing"))
        if all(f"{name}_seconds" in row for row in rows)
    ]
    return f"sampling took {sampling:.3g} s; with it, the step is {', '.join(gains)}"
