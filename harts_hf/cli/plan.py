"""`harts plan`: what tree training would save on a rollout file, as text and a picture. Needs no torch.

Unless `--model` names a model: its configuration alone is read then.
"""

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from harts_hf.cli.checks import check_output_file, check_picture, refuse_same_output, refuse_to_overwrite
from harts_hf.cli.loading import (
    add_rollouts,
    empty_model,
    parse_all,
    read_rollouts,
    summary,
    tokenizer_on_demand,
    warn_of_long_rows,
)
from harts_hf.cli.output import printable, replacing, write_json
from harts_hf.cli.parsing import CommandParser
from harts_hf.cli.plan_report import DEFAULT_ROW_BYTES, plan_report
from harts_hf.cli.plan_text import format_report
from harts_hf.planner import CostModel, PlannerConfig
from harts_hf.rollouts.files import RolloutFile

if TYPE_CHECKING:
    from harts_hf.cli.plan_model import PlannedModel

DESCRIPTION = """\
Says what tree training would save on a file of rollouts: tokens, estimated time and memory, before and after, over all
groups; then a line per group, and what the plan of a training step does. Needs no GPU. Estimates are for Ling-3.0-tiny
on an H200 unless --model or --cost says otherwise.
"""
# Of the options, those that --memory chooses otherwise.
LIMITS = {"max_tokens_per_microbatch", "max_graph_tokens"}


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit status."""
    options = parse_all(_parser(), argv)
    inputs = (options.rollouts, options.cost, options.tokenizer, options.model)
    refuse_to_overwrite(options.json, *inputs)
    refuse_to_overwrite(options.plot, *inputs)
    refuse_same_output("--plot", options.plot, "--json", options.json)
    check_output_file("--json", options.json)
    check_picture("--plot", options.plot)
    if options.groups_per_step is not None and options.groups_per_step < 1:
        raise ValueError(f"expected --groups-per-step of at least 1, got {options.groups_per_step}")
    if options.memory is not None and options.model is None:
        raise ValueError("expected --model with --memory, whose size says what fits, got none")
    given = {
        field.name: getattr(options, field.name)
        for field in fields(PlannerConfig)
        if getattr(options, field.name, None) is not None
    }
    config = PlannerConfig(**{**given, "cost": None if options.cost is None else CostModel.load(options.cost)})
    file = read_rollouts(options, tokenizer_on_demand(options.tokenizer))
    model = None if options.model is None else _planned_model(options, file)
    if model is not None:
        config = model.configured(config, memory=options.memory, keeps_limits=bool(LIMITS & given.keys()))
    report = plan_report(
        file.groups,
        config,
        groups_per_step=options.groups_per_step,
        row_bytes=DEFAULT_ROW_BYTES if model is None else model.row_bytes,
        scores=_has_old_logprobs(file) if options.scoring == "auto" else options.scoring == "needed",
    )
    print(format_report(report))
    if model is not None:
        print("\n" + "\n".join(model.said))
    if file.num_conversations:
        print(summary(file))
    if options.verbose:
        print(f"\n{report.schedule}")
    if options.json:
        about = {"form": file.form, "conversations": file.num_conversations, "notes": dict(file.notes)}
        write_json(options.json, {**report.to_dict(), "input": about})
        print(f"\nwrote {printable(options.json)}")
    if options.plot:
        from harts_hf.cli.plan_picture import plot_plan

        group = max(file.groups, key=lambda g: g.tree.num_tokens)
        with replacing(options.plot) as new:
            plot_plan(report, group, new)
        print(f"\nwrote {printable(options.plot)}")
    return 0


def _has_old_logprobs(file: RolloutFile) -> bool:
    return all(rollout.old_logprobs is not None for group in file.groups for rollout in group.rollouts)


def _planned_model(options: argparse.Namespace, file: RolloutFile) -> "PlannedModel":
    from harts_hf.cli.plan_model import PlannedModel

    model = empty_model(options.model)
    warn_of_long_rows(file, model.config)
    return PlannedModel(model, printable(Path(options.model).name))


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="harts plan", description=DESCRIPTION)
    defaults = PlannerConfig()
    add_rollouts(parser, tokenizer="folder or cached name of a tokenizer, for rows with messages")
    parser.add_argument(
        "--model",
        metavar="M",
        help="folder, configuration (.json) or cached name of the model to estimate for, instead of Ling-3.0-tiny; "
        "weights are not read",
    )
    parser.add_argument(
        "--groups-per-step",
        type=int,
        metavar="N",
        help="groups that an optimizer step trains, in the order of the file (default: all of them in one)",
    )
    parser.add_argument(
        "--max-tokens-per-microbatch",
        type=int,
        help=f"network rows of one forward (default: what fits into --memory, else "
        f"{defaults.max_tokens_per_microbatch:,})",
    )
    parser.add_argument("--max-linear-rows", type=int, help="rows of its linear layers, replay included")
    parser.add_argument("--max-graph-tokens", type=int, help="rows whose graphs may be alive at once")
    parser.add_argument("--max-handoff-bytes", type=int, help="bytes of boundary states alive at once on a rank")
    parser.add_argument("--world-size", type=int, default=1, help="ranks, at most 4,096 (default: %(default)s)")
    parser.add_argument("--chunk-size", type=int, default=defaults.chunk_size, help="chunk of the linear rule")
    parser.add_argument("--sharing", default=defaults.sharing, help="auto, always or never (default: %(default)s)")
    parser.add_argument("--execution", default=defaults.execution, help="auto, replay, nested or keep")
    parser.add_argument(
        "--scoring",
        choices=("auto", "needed", "skipped"),
        default="auto",
        help="whether log-probs are needed before a step's loss, as for a KL term or a second step on one generation "
        "(default: where the file has old_logprobs, which are compared with; else not, as with TRL's defaults)",
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="memory of a GPU, such as 141GB: with --model, prints how many rows of a microbatch fit (with AdamW, in "
        "one process), and plans with those that fit with gradient checkpointing",
    )
    parser.add_argument("--cost", metavar="FILE", help="cost model that `harts bench --fit-cost` wrote")
    parser.add_argument("--plot", metavar="FILE", help="draw the gain, the largest group's tree and the schedule")
    parser.add_argument("--json", metavar="FILE", help="write the table and the schedule")
    parser.add_argument("--verbose", action="store_true", help="print the schedule too")
    return parser
