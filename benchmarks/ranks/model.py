"""What the planner's model says of 1 to 64 ranks on recorded shapes, for two models; no GPU, nothing measured."""

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu import record
from benchmarks.machine import describe_machine
from benchmarks.ranks.judging import BARS, lost_of
from benchmarks.ranks.models import FLASH, NAME, flash_configuration
from benchmarks.update.workloads import groups_of
from harts_hf.forest import concatenate_trees
from harts_hf.modeling.costs import scaled_cost
from harts_hf.planner import DEFAULT_COST, CostModel, PlannerConfig, Schedule, count_world
from harts_hf.planner.choosing import plan_step
from harts_hf.planner.execution import DUMMY
from harts_hf.planner.plan import no_sharing_bound
from harts_hf.tree import RolloutTree

RANKS = (1, 2, 4, 8, 16, 32, 64)
# Rows of a microbatch: those of the timed jobs, and of the large one.
BUDGETS = {NAME: 32768, FLASH: 16384}
SAID = "estimated, not measured"
# Sets whose groups are planned by themselves, too.
APART = ("miniswe_b_drop",)
VALUES = 2  # of a row that travel: log-probs and entropies
ARRAYS = ("parent", "depth", "subtree_end", "end_rows")
DRY_RANKS, DRY_SET = (1, 2, 4), "lats_webshop"


def costs(*, dry: bool = False) -> dict[str, CostModel]:
    """By model: the default, which is Ling-3.0-tiny's, and Ling-3.0-flash's, which is scaled by its work."""
    with torch.device("meta"):
        flash = AutoModelForCausalLM.from_config(flash_configuration(None, dry=dry), dtype=torch.bfloat16)
    return {NAME: DEFAULT_COST, FLASH: scaled_cost(flash, FLASH)}


def bounds(tree: RolloutTree, config: PlannerConfig, world: int) -> dict[str, float]:
    """Estimated seconds of an on-policy step: one rank's over the ranks, and the longest row alone on a rank.

    Args:
        tree: of the step.
        config: of plans for one rank.
        world: ranks.
    """
    longest = RolloutTree.from_shape([-1], [int(tree.trajectory_lengths.max())], [0])
    one, path = (plan_step(of, config, can_skip_scoring=True).estimated_seconds for of in (tree, longest))
    return {"mean": one / world, "path": path}


def ops_of(schedule: Schedule) -> list[list[tuple[float, bool]]]:
    """By rank, estimated seconds of each op and whether it is a dummy, as jobs report them."""
    ranks = range(schedule.config.world_size)
    return [[(schedule.op_seconds(op), op[1] == DUMMY) for op in schedule.ops(rank)] for rank in ranks]


def at_dummies(schedule: Schedule) -> float:
    """Of all ranks' time, the part in which they are at dummies and wait beside them."""
    slots, ranks = schedule.slot_seconds.max(axis=0).tolist(), range(schedule.config.world_size)
    strings = [schedule.ops(rank) for rank in ranks]
    idle = sum(seconds for ops in strings for seconds, (_, index) in zip(slots, ops, strict=True) if index == DUMMY)
    return float(idle / (sum(slots) * len(strings)))


def row_of(tree: RolloutTree, config: PlannerConfig, bound: Mapping[str, float]) -> dict[str, Any]:
    """A step's plan beside the least that packed rows take on as many ranks, and beside what is possible.

    Args:
        tree: of the step.
        config: of plans, with the ranks.
        bound: what :func:`bounds` says.
    """
    fresh = RolloutTree(**{name: getattr(tree, name) for name in ARRAYS}, token_ids=None)
    begun = time.process_time()
    schedule = plan_step(fresh, config, can_skip_scoring=True)
    planning = time.process_time() - begun
    packed = max(no_sharing_bound(tree, config, "nested"), bound["path"])
    step, counts = schedule.estimated_seconds, count_world(schedule, num_values=VALUES)
    possible = max(bound["mean"], bound["path"])
    row = {
        "ranks": config.world_size, "execution": schedule.execution, "seconds": step, "packed_seconds": packed,
        "speedup": packed / step, "gain": bound["mean"] * config.world_size / step, "scaling": possible / step,
        "mean_seconds": bound["mean"], "path_seconds": bound["path"], "lost": lost_of(ops_of(schedule))["lost"],
        "at_dummies": at_dummies(schedule), "balance": counts.balance, "dummies": counts.dummies, "ops": counts.ops,
        "microbatches": len(schedule.microbatches), "computed_over_unique": counts.tokens_per_unique,
        "scored_again": schedule.forward_tokens / schedule.backward_tokens - 1,
        "exchanged_bytes": counts.exchanged_bytes, "planning_seconds": planning, "planner_share": planning / step,
    }  # fmt: skip
    rounded = {name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in row.items()}
    return {**rounded, "bars": bars_met(row)}


def bars_met(row: Mapping[str, Any]) -> dict[str, bool]:
    """Scaling and the planner's share; what is lost only where the longest row leaves no rank idle."""
    found = {
        "scaling": row["scaling"] >= BARS["scaling"],
        "planner_share": row["planner_share"] < BARS["planner_share"],
    }
    if row["path_seconds"] <= row["mean_seconds"]:
        found["lost"] = row["lost"] < BARS["lost"]
    return found


def steps_in(shapes: Path, *, dry: bool) -> Iterator[tuple[str, str, RolloutTree]]:
    """Set, groups (all, or a number) and the forest of each step that is planned."""
    names = [DRY_SET] if dry else sorted(path.name.removesuffix(".jsonl.gz") for path in shapes.glob("*.jsonl.gz"))
    for name in names:
        trees = [group.shape for group in groups_of(shapes, name, dry=dry)]
        yield name, "all", concatenate_trees(trees)
        if name in APART:
            yield from ((name, str(number), tree) for number, tree in enumerate(trees))


def main(options: argparse.Namespace) -> None:
    """Plans all steps, writes, prints and draws."""
    dry = options.dry_run
    steps = list(steps_in(options.shapes, dry=dry))
    if not steps:
        raise SystemExit(f"expected shape files (NAME.jsonl.gz) in {options.shapes}, found none")
    rows: list[dict[str, Any]] = []
    for model, cost in costs(dry=dry).items():
        config = PlannerConfig(max_tokens_per_microbatch=BUDGETS[model] // (128 if dry else 1), cost=cost)
        for name, groups, tree in steps:
            about = {
                "said": SAID, "model": model, "set": name, "groups": groups, "trajectories": tree.num_trajectories,
                "tokens": tree.num_expanded_tokens, "unique_tokens": tree.num_tokens,
                "budget": config.max_tokens_per_microbatch,
            }  # fmt: skip
            one = bounds(tree, config, 1)
            for ranks in DRY_RANKS if dry else RANKS:
                bound = {"mean": one["mean"] / ranks, "path": one["path"]}
                rows.append({**about, **row_of(tree, replace(config, world_size=ranks), bound)})
                print(line_of(rows[-1]), flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    record.write(options.out, {"said": SAID, "machine": describe_machine(), "bars": BARS, "rows": rows})
    draw([row for row in rows if row["groups"] == "all"], options.out.with_suffix(".png"))
    print(table_of(rows), summary_of(rows), sep="\n")


def line_of(row: Mapping[str, Any]) -> str:
    """A row in words."""
    return (
        f"{row['model']:14} {row['set'][:16]:16} {row['groups']:>3} R {row['ranks']:2} {row['execution']:6} "
        f"{row['seconds']:8.3f} s  packed {row['speedup']:6.2f}x  one {row['gain']:5.2f}x  "
        f"scaling {row['scaling']:.3f}  lost {row['lost']:5.1%}, at dummies {row['at_dummies']:5.1%}  "
        f"rows {row['computed_over_unique']:.3f}  {row['exchanged_bytes'] / 1e6:5.0f} MB  "
        f"planner {row['planner_share']:.2%}"
    )


def table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """For docs/ranks.md: gain over one rank, its part of what is possible, time lost, of the whole sets in APART and
    tau_airline_b."""
    shown = [row for row in rows if row["groups"] == "all" and row["set"] in (*APART, "tau_airline_b")]
    ranks = sorted({row["ranks"] for row in shown if row["ranks"] > 1})
    lines = [f"| estimated | {' | '.join(map(str, ranks))} |", "|---" * (len(ranks) + 1) + "|"]
    for model, name in dict.fromkeys((row["model"], row["set"]) for row in shown):
        own = {row["ranks"]: row for row in shown if (row["model"], row["set"]) == (model, name)}
        cells = [
            f"{row['gain']:.2f}x, {'' if row['bars']['scaling'] else '**'}{row['scaling']:.3f}"
            f"{'' if row['bars']['scaling'] else '**'}, {row['lost']:.0%}, {row['speedup']:.1f}x"
            for row in (own[count] for count in ranks)
        ]
        lines.append(f"| {model}, `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def summary_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many rows of several ranks meet each bar: one rank alone meets what is judged here by definition."""
    rows = [row for row in rows if row["ranks"] > 1]
    lines = [f"{SAID}: {len(rows)} plans on several ranks"]
    for name in ("scaling", "lost", "planner_share"):
        judged = [row["bars"][name] for row in rows if name in row["bars"]]
        lines.append(f"  {name} (bar {BARS[name]}): {sum(judged)} of {len(judged)} meet it")
    return "\n".join(lines)


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """What so many ranks gain over one, by model and set, with what is possible."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    models = list(dict.fromkeys(row["model"] for row in rows))
    for axes, model in zip(figure.subplots(1, len(models), sharey=True, squeeze=False)[0], models, strict=True):
        for color, name in enumerate(dict.fromkeys(row["set"] for row in rows)):
            own = [row for row in rows if (row["model"], row["set"]) == (model, name)]
            ranks = [row["ranks"] for row in own]
            axes.plot(ranks, [row["gain"] for row in own], "o-", color=f"C{color}", label=name, markersize=3)
            axes.plot(ranks, [row["gain"] / row["scaling"] for row in own], ":", color=f"C{color}", linewidth=1)
        axes.set(xlabel="ranks", title=f"{model}: {SAID}", xscale="log", yscale="log")
        axes.set_xticks(ranks, map(str, ranks))
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("one rank's step / theirs (dotted: mean or longest row)")
    figure.axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=110)
