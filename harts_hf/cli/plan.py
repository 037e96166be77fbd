"""`harts plan`: what tree training would do for a rollout file, as a table and a picture. Needs no torch."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from harts_hf.cli.checks import check_output_file, check_picture, refuse_to_overwrite
from harts_hf.cli.loading import add_rollouts, empty_model, load_tokenizer, read_rollouts, summary
from harts_hf.cli.output import printable, replacing, write_json
from harts_hf.planner import (
    CostModel,
    PlannerConfig,
    Schedule,
    WorldCounts,
    build_chunk_tree,
    count_world,
    min_linear_calls,
    no_sharing_bound,
    plan_window,
)
from harts_hf.planner.text import counted
from harts_hf.rollouts.files import RolloutGroup
from harts_hf.tree import RolloutTree

COLUMNS = ("group", "trajectories", "expanded", "unique", "ratio", "depth", "replay", "calls", "calls (ends)")
MAX_GROUPS = 20
LIMITS = {"max_tokens_per_microbatch", "max_graph_tokens"}
MAX_CELL = 40


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit status."""
    options = _parser().parse_args(argv)
    inputs = (options.rollouts, options.cost, options.tokenizer)
    refuse_to_overwrite(options.json, *inputs)
    refuse_to_overwrite(options.plot, *inputs, options.json)
    check_output_file("--json", options.json)
    check_picture("--plot", options.plot)
    given = {
        field.name: getattr(options, field.name)
        for field in fields(PlannerConfig)
        if getattr(options, field.name, None) is not None
    }
    config = PlannerConfig(**{**given, "cost": None if options.cost is None else CostModel.load(options.cost)})
    fits = None
    if options.memory is not None:
        config, fits = _fitted(options, config, chosen=bool(LIMITS & given.keys()))
    tokenizer = None if options.tokenizer is None else load_tokenizer(options.tokenizer)
    file = read_rollouts(options, tokenizer)
    groups = file.groups
    report = plan_report(groups, config)
    schedule: Schedule = report.pop("schedule")
    report["input"] = {"form": file.form, "conversations": file.num_conversations, "notes": dict(file.notes)}
    print(format_report(report))
    if fits is not None:
        print(fits)
    if file.num_conversations:
        print(summary(file))
    if options.verbose:
        print(f"\n{schedule}")
    if options.json:
        content = {**report, "schedule": json.loads(schedule.to_json())}
        write_json(options.json, content)
        print(f"\nwrote {printable(options.json)}")
    if options.plot:
        from harts_hf.rollouts.plot import plot_plan

        group = max(groups, key=lambda g: g.tree.num_tokens)
        with replacing(options.plot) as new:
            plot_plan(group.tree, group.rewards, schedule, new, group=printable(group.name))
        print(f"\nwrote {printable(options.plot)}")
    return 0


def _fitted(options: argparse.Namespace, config: PlannerConfig, *, chosen: bool) -> tuple[PlannerConfig, str]:
    if options.model is None:
        raise ValueError("expected --model with --memory, whose size says what fits, got none")
    from harts_hf.cli.plan_memory import fitted

    return fitted(options.memory, empty_model(options.model), config, chosen=chosen)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="harts plan", description=__doc__)
    defaults = PlannerConfig()
    add_rollouts(parser, tokenizer="folder or cached name of a tokenizer, for rows with messages")
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
    parser.add_argument("--model", metavar="M", help="folder, configuration (.json) or cached name of a model")
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="memory of a GPU, such as 141GB: with --model, prints how many rows of a microbatch fit (with AdamW, in "
        "one process), and plans with those that fit with gradient checkpointing",
    )
    parser.add_argument("--cost", metavar="FILE", help="cost model that `harts bench --fit-cost` wrote")
    parser.add_argument("--plot", metavar="FILE", help="draw the largest group's tree and the schedule")
    parser.add_argument("--json", metavar="FILE", help="write the table and the schedule")
    parser.add_argument("--verbose", action="store_true", help="print the schedule too")
    return parser


def plan_report(groups: Sequence[RolloutGroup], config: PlannerConfig) -> dict[str, Any]:
    """Everything that `harts plan` tells, with the schedule itself under ``schedule``."""
    trees = [group.tree for group in groups]
    rows = [_group_row(group.name, group.tree, config.chunk_size) for group in groups]
    schedule = plan_window(trees, config)
    # A bound, not a plan: the gain is not flattered by how well trajectories happen to pack.
    alone = no_sharing_bound(schedule.tree, config, schedule.execution)
    if alone <= schedule.estimated_seconds:  # the bound says nothing: many ranks, few trajectories, little to share
        alone = plan_window(trees, replace(config, sharing="never")).estimated_seconds
    total = {
        "group": "all",
        **{key: sum(row[key] for row in rows) for key in ("trajectories", "expanded", "unique", "replay")},
        **{key: max(row[key] for row in rows) for key in ("depth", "calls", "calls (ends)")},
    }
    total["ratio"] = total["expanded"] / total["unique"]
    return {
        "groups": rows,
        "total": total,
        "plan": {
            "world_size": config.world_size,
            "max_tokens_per_microbatch": config.max_tokens_per_microbatch,
            "execution": schedule.execution,
            "microbatches": len(schedule.microbatches),
            "forward_tokens": schedule.forward_tokens,
            "backward_tokens": schedule.backward_tokens,
            "replay_tokens": schedule.replay_tokens,
            "peak_graph_tokens": schedule.peak_graph_tokens,
            "peak_handoff_tokens": schedule.peak_handoff_tokens,
            "estimated_seconds": schedule.estimated_seconds,
            "estimated_seconds_without_sharing": alone,
            "estimated_gain": alone / schedule.estimated_seconds,
            "cost_model": schedule.cost.source,
            "decision": schedule.decision,
        },
        "world": _world_row(count_world(schedule), schedule.estimated_seconds),
        "schedule": schedule,
    }


def _world_row(world: WorldCounts, seconds: float) -> dict[str, Any]:
    return {"balance": world.balance, "step_seconds": seconds, **vars(world)}


def _world_lines(world: dict[str, Any], world_size: int) -> list[str]:
    """What all ranks do together, a line each with what the word means; nothing on one rank."""
    if world_size == 1:
        return []
    waiting = 1 - world["slowest_seconds"] / world["step_seconds"] if world["step_seconds"] else 0.0
    rows = [
        ("balance", f"{world['balance']:.3f}", "seconds of a rank's own work: mean over ranks / slowest rank"),
        ("waiting", f"{waiting:.1%}", "of the step that even the slowest rank waits: ranks run op by op side by side"),
        ("idle ranks", f"{world['idle_ranks']:,}", "have no microbatch at all"),
        (
            "repeated rows",
            f"{world['repeated_tokens']:,} ({world['tokens_per_unique']:.3f}x)",
            "are computed on a rank although another does too (all computed / unique)",
        ),
        (
            "dummies",
            f"{world['dummies']:,} of {world['ops']:,}",
            "ops run one token, so that ranks run equal strings",
        ),
        (
            "exchanged",
            f"{world['exchanged_bytes'] / 1e6:,.1f} MB",
            "to each rank, if all hold as many tokens: at most ids, a value and a coefficient per unique row",
        ),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"{name.ljust(widths[0])}  {value.ljust(widths[1])}  {words}" for name, value, words in rows]
    return ["", f"all {world_size:,} ranks together:", *lines]


def _group_row(name: str, tree: RolloutTree, chunk_size: int) -> dict[str, Any]:
    return {
        "group": name,
        "trajectories": tree.num_trajectories,
        "expanded": tree.num_expanded_tokens,
        "unique": tree.num_tokens,
        "ratio": tree.sharing_ratio,
        "depth": int(tree.depth.max()) + 1,
        "replay": build_chunk_tree(tree.parent, tree.depth, chunk_size).replay_rows,
        "calls": min_linear_calls(tree, chunk_size),
        "calls (ends)": min_linear_calls(tree, chunk_size, taps="ends"),
    }


def format_report(report: dict[str, Any]) -> str:
    """The report as text: one line per group, the total, and what the plan does."""
    rows = report["groups"]
    shown = rows if len(rows) <= MAX_GROUPS else rows[:MAX_GROUPS]
    table = [list(COLUMNS)] + [_cells(row) for row in [*shown, report["total"]]]
    widths = [max(len(line[i]) for line in table) for i in range(len(COLUMNS))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in table
    ]
    if len(rows) > len(shown):
        lines.insert(-1, f"... {len(rows) - len(shown)} more groups")
    plan = report["plan"]
    return "\n".join(
        [
            *lines,
            "",
            f"{counted(plan['microbatches'], 'microbatch', 'microbatches')} of at most "
            f"{plan['max_tokens_per_microbatch']:,} tokens on {counted(plan['world_size'], 'rank')}, "
            f"{plan['execution']} execution",
            f"tokens: forward {plan['forward_tokens']:,}, backward {plan['backward_tokens']:,}, "
            f"replay {plan['replay_tokens']:,}",
            f"peaks: graph {plan['peak_graph_tokens']:,}, handoff {plan['peak_handoff_tokens']:,} tokens",
            f"estimated {plan['estimated_seconds']:.3g} s a step, without sharing at least "
            f"{plan['estimated_seconds_without_sharing']:.3g} s: {plan['estimated_gain']:.2f}x ({plan['cost_model']})",
            f"{plan['decision']}",
            *_world_lines(report["world"], plan["world_size"]),
        ]
    )


def _cells(row: dict[str, Any]) -> list[str]:
    cells = [_cell(column, row[column]) for column in COLUMNS]
    return [cell if len(cell) <= MAX_CELL else cell[: MAX_CELL - 3] + "..." for cell in cells]


def _cell(column: str, value: Any) -> str:
    if column == "ratio":
        return f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else printable(value)
