"""The picture of `harts plan`: the gain over all groups, the largest tree, and the schedule of the longest step."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure, SubFigure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.patches import Patch

from harts_hf.cli.output import printable
from harts_hf.cli.plan_report import Gain, PlanReport, RowBytes
from harts_hf.cli.plan_text import NOT_ESTIMATED, cost_name, gain_rows
from harts_hf.planner import Schedule, count_world
from harts_hf.planner.text import counted
from harts_hf.planner.walk import FloatArray
from harts_hf.rollouts.files import RolloutGroup
from harts_hf.rollouts.plot import draw_rewards, draw_segments, num_lines

# No colour stands for two things: those of trees are in rollouts/plot.py.
BEFORE, AFTER, KEPT = "0.62", "#1b9e77", "#e6550d"
OP_COLOURS = {"S": "#edae49", "F": "#30638e", "B": "#d1495b"}
OP_NAMES = {"S": "forward, for log-probs only", "F": "forward", "B": "backward"}
STATES_NAME = "forward, for states only"  # a trunk whose graph does not stay
TRUNK_COLOUR = "0.25"
TRUNK_NAME = "trunk"
DUMMY_COLOUR = "0.88"
DUMMY_NAME = "filler (one token)"
KEPT_NAME = "kept for later microbatches"
EXECUTIONS = {
    "replay": "every microbatch forward for log-probs, then forward and backward",
    "nested": "forwards and backwards nested along the tree",
    "keep": "all forwards, then all backwards",
}
# Above this many, ranks are drawn as lines of cells.
MANY_RANKS = 16
MAX_NAME = 60
BELOW_BRACKETS = -0.2  # where bars begin that have brackets above


def plot_plan(report: PlanReport, group: RolloutGroup, path: str | Path) -> None:
    """Draws a plan to ``path`` (the suffix says the format).

    Args:
        report: the plan.
        group: whose tree is drawn: the largest, as a rule.
        path: the picture to write.
    """
    world_size = report.schedule.config.world_size
    lines = min(30, max(6, num_lines(group.tree)))
    heights = [2.7, 1.2 + 0.16 * lines, 1.1 + 0.7 * min(world_size, MANY_RANKS) + 1.6]
    figure = Figure(figsize=(11, sum(heights)), layout="constrained")
    parts: Any = figure.subfigures(3, 1, height_ratios=heights, hspace=0.02)
    panel, above, below = parts
    draw_gain(panel, report)
    _draw_tree(above.subplots(), group)
    ops, memory = below.subplots(2, 1, sharex=True, height_ratios=[heights[2] - 1.6, 1.6])
    draw_schedule(ops, report.schedule, of_steps=len(report.schedules))
    draw_memory(memory, report.schedule, report.row_bytes)
    figure.savefig(path, dpi=120)


def drawable(text: object) -> str:
    """The text with what the font has no glyph for, or what is no character to print, as an escape; cut if long."""
    known = _characters()
    shown = "".join(
        character if ord(character) in known else character.encode("unicode_escape", "backslashreplace").decode()
        for character in printable(text)
    )
    return shown if len(shown) <= MAX_NAME else f"{shown[: MAX_NAME - 3]}..."


@cache
def _characters() -> frozenset[int]:
    return frozenset(get_font(findfont(FontProperties())).get_charmap())


# ---- the gain -------------------------------------------------------------------------------------------------------


def draw_gain(figure: Figure | SubFigure, report: PlanReport) -> None:
    """Bars of tokens, estimated time and memory, each trajectory by itself and on trees."""
    total = report.total
    steps = f", {counted(len(report.schedules), 'step')}" if len(report.schedules) > 1 else ""
    what = f"{counted(total['trajectories'], 'trajectory', 'trajectories')} of {counted(len(report.groups), 'group')}"
    figure.suptitle(f"All groups: {what}{steps}", fontsize=12, x=0.01, ha="left")
    bars = _gain_bars(report.gain)
    for index, (axes, parts, (name, old, new, words)) in enumerate(
        zip(figure.subplots(1, 3), bars, gain_rows(report.gain), strict=True)
    ):
        before, after, kept = parts
        axes.barh([0, 1], [before, after], color=[BEFORE, AFTER], height=0.62)
        axes.barh([1], [kept], left=[after], color=KEPT, height=0.62)
        axes.set_yticks([0, 1], ["before:\none by one", "after:\non trees"] if not index else ["", ""])
        axes.tick_params(left=False)
        axes.set_ylim(1.6, -0.6)
        axes.set_xlim(0, 1.3 * max(before, after + kept) or 1.0)
        axes.set_xticks([])
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        for height, length, text in ((0, before, old), (1, after + kept, new)):
            axes.annotate(text, (length, height), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
        axes.set_title(f"{name}: {words}" if words else name, fontsize=11, loc="left", fontweight="bold")
        if index == len(bars) - 1:
            handles = [Patch(color=AFTER, label="activations")]
            handles += [Patch(color=KEPT, label=KEPT_NAME)] if kept else []
            place = {"loc": "upper left", "bbox_to_anchor": (0, 0.05)}
            axes.legend(handles=handles, ncols=2, fontsize=8, frameon=False, **place)
    notes = f"Estimates for {drawable(cost_name(report.schedule.cost.source))}.\n{NOT_ESTIMATED}."
    figure.supxlabel(notes, x=0.01, ha="left", fontsize=7.5, color="0.35")


def _gain_bars(gain: Gain) -> list[tuple[float, float, float]]:
    """Per quantity: before, after, and what is kept on top of that."""
    before, after = gain.memory
    return [(*gain.tokens, 0.0), (*gain.seconds, 0.0), (before.total, after.activations, after.kept)]


# ---- tree and schedule ----------------------------------------------------------------------------------------------


def _draw_tree(axes: Axes, group: RolloutGroup) -> None:
    tree, rewards = group.tree, group.rewards
    heights = draw_segments(axes, tree)
    draw_rewards(axes, tree, rewards, heights)
    trajectories = counted(tree.num_trajectories, "trajectory", "trajectories")
    axes.set_title(
        f"The largest group, {drawable(group.name)}: {trajectories}, {tree.num_expanded_tokens:,} tokens, "
        f"{tree.num_tokens:,} on its tree",
        fontsize=10,
        loc="left",
        parse_math=False,  # names may hold dollars
    )


def draw_schedule(axes: Axes, schedule: Schedule, *, of_steps: int = 1) -> None:
    """Draws ops of every rank over estimated time (lockstep).

    Up to ``MANY_RANKS`` ranks each has bars; above, each is a line of cells, paler where the rank waits for slower
    ones.
    """
    world_size = schedule.config.world_size
    begins = _begins(schedule)
    if world_size > MANY_RANKS:
        _draw_cells(axes, schedule, begins)
    else:
        brackets = [bracket for rank in range(world_size) for bracket in trunk_brackets(schedule, rank)]
        _draw_bars(axes, schedule, begins, top=BELOW_BRACKETS if brackets else -0.35)
        if brackets:
            _draw_brackets(axes, brackets, begins)
        axes.set_yticks(range(world_size), [f"rank {rank}" for rank in range(world_size)])
    drawn = {kind for kind, _ in schedule.ops(0)}
    for kind, colour in OP_COLOURS.items():
        if kind in drawn:
            name = STATES_NAME if kind == "S" and schedule.execution == "nested" else OP_NAMES[kind]
            axes.broken_barh([], (0, 1), facecolors=colour, label=name)
    if any(index < 0 for rank in range(world_size) for _, index in schedule.ops(rank)):
        axes.broken_barh([], (0, 1), facecolors=DUMMY_COLOUR, label=DUMMY_NAME)
    axes.set_ylim(world_size - 0.5, -0.5)
    axes.set_xlim(0, float(begins[-1]) or 1.0)
    balance = f", balance {count_world(schedule).balance:.2f}" if world_size > 1 else ""
    microbatches = counted(len(schedule.microbatches), "microbatch", "microbatches")
    which = "The step" if of_steps == 1 else f"The longest of {of_steps:,} steps"
    axes.set_title(
        f"{which}: {microbatches} on {counted(world_size, 'rank')}{balance}\n({EXECUTIONS[schedule.execution]})",
        fontsize=10,
        loc="left",
    )
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, fontsize=8, frameon=False)


def draw_memory(axes: Axes, schedule: Schedule, row_bytes: RowBytes) -> None:
    """Draws the memory of the rank that needs most over estimated time: activations, and kept states above them."""
    most, series = 0.0, (0, np.zeros(0), np.zeros(0))
    for rank in range(schedule.config.world_size):
        counts = schedule.memory_counts(rank)
        activations, kept = row_bytes.activations(counts) / 1e9, counts.handed_bytes / 1e9
        peak = float((activations + kept).max(initial=0.0))
        if peak > most:
            most, series = peak, (rank, activations, kept)
    rank, activations, kept = series
    own = [slot for slot, (_, index) in enumerate(schedule.ops(rank)) if index >= 0]
    begins = _begins(schedule)
    edges = np.append(begins[own], begins[own[-1] + 1] if own else 0.0)

    def steps(values: FloatArray) -> FloatArray:
        return np.append(values, values[-1:])

    if own:
        axes.fill_between(edges, steps(activations), step="post", color=AFTER, label="activations", linewidth=0)
        axes.fill_between(
            edges, steps(activations), steps(activations + kept), step="post", color=KEPT, label=KEPT_NAME, linewidth=0
        )
    axes.set_ylim(0, 1.15 * most or 1.0)
    axes.set_xlabel("estimated seconds")
    axes.set_ylabel("GB")
    of_rank = f" of rank {rank}, which needs most" if schedule.config.world_size > 1 else ""
    axes.set_title(f"Memory{of_rank}", fontsize=10, loc="left")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize=8, frameon=False)


def _begins(schedule: Schedule) -> FloatArray:
    """``[slots + 1]`` float64: when each op begins, and the end."""
    return np.concatenate([[0.0], np.cumsum(schedule.slot_seconds.max(axis=0))])


def _draw_bars(axes: Axes, schedule: Schedule, begins: FloatArray, top: float) -> None:
    for rank in range(schedule.config.world_size):
        ops = schedule.ops(rank)
        for kind in "SFB":
            for dummy in (False, True):
                bars: Sequence[tuple[float, float]] = [
                    (begins[i], schedule.op_seconds(op))
                    for i, op in enumerate(ops)
                    if op[0] == kind and (op[1] < 0) == dummy
                ]
                colour = DUMMY_COLOUR if dummy else OP_COLOURS[kind]
                axes.broken_barh(bars, (rank + top, 0.35 - top), facecolors=colour, edgecolors="white", linewidths=0.3)


def trunk_brackets(schedule: Schedule, rank: int) -> list[tuple[int, int, int, int]]:
    """Per trunk of a rank: the rank, how many trunks it reads, its first and its last op, as indices of the rank's.

    The first is the first forward with a graph of it or its dependents, the last its backward: in between, gradients
    of its states add up.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for slot, (kind, index) in enumerate(schedule.ops(rank)):
        if index < 0 or kind == "S":
            continue
        if kind == "B":
            last[index] = slot
            continue
        for one in (index, *schedule.microbatches[index].trunks):
            first.setdefault(one, slot)
    own = (microbatch for microbatch in schedule.microbatches if microbatch.rank == rank)
    trunks = sorted({trunk for microbatch in own for trunk in microbatch.trunks})
    return [(rank, len(schedule.microbatches[one].trunks), first[one], last[one]) for one in trunks]


def _draw_brackets(axes: Axes, brackets: list[tuple[int, int, int, int]], begins: FloatArray) -> None:
    """Above a rank's bars, outer trunks above inner ones."""
    room = (BELOW_BRACKETS + 0.45) / max(level + 1 for _, level, _, _ in brackets)
    lines = []
    for rank, level, first, last in brackets:
        y, left, right = rank - 0.45 + level * room, begins[first], begins[last + 1]
        lines.append([(left, y + 0.6 * room), (left, y), (right, y), (right, y + 0.6 * room)])
    axes.add_collection(LineCollection(lines, colors=TRUNK_COLOUR, linewidths=0.8, label=TRUNK_NAME), autolim=False)


def _draw_cells(axes: Axes, schedule: Schedule, begins: FloatArray) -> None:
    """A cell per rank and op: the colour of its kind, mixed with white by the part of the slot that the rank waits."""
    seconds = schedule.slot_seconds
    busy = seconds / np.maximum(seconds.max(axis=0), 1e-30)
    colours = np.array([to_rgb(OP_COLOURS[kind]) for kind, _ in schedule.ops(0)]).reshape(-1, 3)
    cells = 1 - busy[:, :, None] * (1 - colours)
    ranks = range(schedule.config.world_size)
    cells[np.array([[index < 0 for _, index in schedule.ops(rank)] for rank in ranks])] = to_rgb(DUMMY_COLOUR)
    axes.pcolormesh(begins, np.arange(len(ranks) + 1) - 0.5, cells, rasterized=True)
    axes.set_ylabel("rank")
