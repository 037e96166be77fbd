"""Draws a rollout tree: segments as bars along depth, shared ones in one colour, rewards at the ends."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from numpy.typing import NDArray

from harts_hf.planner import Schedule, count_world
from harts_hf.planner.text import counted
from harts_hf.tree import RolloutTree

FloatArray = NDArray[np.float64]

SHARED = "#d1495b"
UNSHARED = "#30638e"
MAX_LABELS = 80


def plot_tree(
    tree: RolloutTree, rewards: Sequence[float | None] | None, path: str | Path, *, title: str | None = None
) -> None:
    """Draws ``tree`` to ``path`` (the suffix says the format).

    Args:
        tree: any rollout tree; bars stand from top to bottom in preorder.
        rewards: one per trajectory (None where unknown), or None to draw no rewards.
        path: the picture to write.
        title: the line above it; the tree's counts if None.

    Raises:
        ValueError: rewards of another number than the trajectories.
    """
    if rewards is not None and len(rewards) != tree.num_trajectories:
        raise ValueError(f"expected {tree.num_trajectories} rewards, one a trajectory, got {len(rewards)}")
    lines = _num_lines(tree)
    figure = Figure(figsize=(10, min(24.0, max(2.5, 1.2 + 0.18 * lines))), layout="constrained")
    axes = figure.subplots()
    heights = draw_segments(axes, tree)
    if rewards is not None:
        _draw_rewards(axes, tree, rewards, heights)
    axes.set_title(
        title
        or f"{tree.num_trajectories} trajectories, {tree.num_tokens:,} unique of {tree.num_expanded_tokens:,} tokens, "
        f"shared {tree.sharing_ratio:.2f}x",
        fontsize=10,
        loc="left",
        parse_math=False,  # names may hold dollars
    )
    figure.savefig(path, dpi=120)


def draw_segments(axes: Axes, tree: RolloutTree) -> FloatArray:
    """Draws every segment as a horizontal bar and the joints between them.

    Returns:
        ``[S]`` float64, the height in the picture of each segment.
    """
    starts = tree.segment_starts
    stops = np.append(starts[1:], tree.num_tokens)
    first, last = tree.depth[starts], tree.depth[stops - 1] + 1
    heights = _segment_heights(tree)
    # Trajectories may end inside a segment, so that it is shared down to there only: colour runs, not segments.
    shared = tree.occurrence_counts > 1
    runs = np.flatnonzero(np.append(True, shared[1:] != shared[:-1]))
    cuts = np.unique(np.concatenate([runs, starts]))
    cut_stops = np.append(cuts[1:], tree.num_tokens)
    segment = np.searchsorted(starts, cuts, side="right") - 1
    width = float(np.clip(220 / max(1, _num_lines(tree)), 0.8, 6.0))
    for colour, which, label in ((SHARED, shared[cuts], "shared"), (UNSHARED, ~shared[cuts], "one trajectory")):
        bars = [
            [(tree.depth[a], heights[s]), (tree.depth[b - 1] + 1, heights[s])]
            for a, b, s in zip(cuts[which], cut_stops[which], segment[which], strict=True)
        ]
        axes.add_collection(LineCollection(bars, colors=colour, linewidths=width, label=label, capstyle="butt"))
    joints = [
        [(first[s], heights[tree.segment_parent[s]]), (first[s], heights[s])]
        for s in range(len(starts))
        if tree.segment_parent[s] >= 0
    ]
    axes.add_collection(LineCollection(joints, colors="0.6", linewidths=0.6, zorder=0))
    axes.set_xlim(0, float(last.max()) * 1.08 + 1)
    axes.set_ylim(float(heights.max()) + 1, -1)
    axes.set_yticks([])
    axes.set_xlabel("depth (tokens)")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize=8, frameon=False)
    return heights


def _num_lines(tree: RolloutTree) -> int:
    return int((tree.num_children == 0).sum())


def _segment_heights(tree: RolloutTree) -> FloatArray:
    """Leaves one below the other; a segment above others stands in the middle of them."""
    above = tree.segment_parent
    heights = np.zeros(len(above))
    low, high = np.full(len(above), np.inf), np.full(len(above), -np.inf)
    inner = np.zeros(len(above), bool)
    inner[above[above >= 0]] = True
    heights[~inner] = np.arange(int((~inner).sum()))
    for segment in range(len(above) - 1, -1, -1):
        if inner[segment]:
            heights[segment] = (low[segment] + high[segment]) / 2
        up = above[segment]
        if up >= 0:
            low[up], high[up] = min(low[up], heights[segment]), max(high[up], heights[segment])
    return heights


def _draw_rewards(axes: Axes, tree: RolloutTree, rewards: Sequence[float | None], segment_heights: FloatArray) -> None:
    known = [i for i, reward in enumerate(rewards) if reward is not None]
    if not known:
        return
    ends = tree.end_rows[known]
    heights = segment_heights[np.searchsorted(tree.segment_starts, ends, side="right") - 1]
    values = [float(rewards[i]) for i in known]  # type: ignore[arg-type]
    depths = tree.depth[ends] + 1
    points = axes.scatter(
        depths, heights, c=values, cmap="viridis", s=22, edgecolors="black", linewidths=0.4, zorder=3
    )
    axes.figure.colorbar(points, ax=axes, label="reward", fraction=0.03, pad=0.01)
    if len(known) <= MAX_LABELS:
        for depth, height, value in zip(depths, heights, values, strict=True):
            axes.annotate(
                f"{value:.2g}", (depth, height), xytext=(5, 0), textcoords="offset points", fontsize=7, va="center"
            )


OP_COLOURS = {"S": "#edae49", "F": "#30638e", "B": "#d1495b"}
OP_NAMES = {"S": "S: forward without graph", "F": "F: forward", "B": "B: backward"}
DUMMY_COLOUR = "0.85"
# Above this many, ranks are drawn as lines of cells.
MANY_RANKS = 16


def plot_plan(
    tree: RolloutTree, rewards: Sequence[float | None], schedule: Schedule, path: str | Path, *, group: str
) -> None:
    """Draws one group's tree and, below it, the schedule of all groups to ``path``."""
    lines = min(40, max(6, _num_lines(tree)))
    height = 1.2 + 0.16 * lines, 1.2 + min(0.7 * schedule.config.world_size, 0.7 * MANY_RANKS)
    figure = Figure(figsize=(11, sum(height)), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=height)
    heights = draw_segments(above, tree)
    _draw_rewards(above, tree, rewards, heights)
    title = f"group {group}: shared {tree.sharing_ratio:.2f}x"
    above.set_title(title, fontsize=10, loc="left", parse_math=False)  # names may hold dollars
    draw_schedule(below, schedule)
    figure.savefig(path, dpi=120)


def draw_schedule(axes: Axes, schedule: Schedule) -> None:
    """Draws ops of every rank over estimated time (lockstep).

    Up to ``MANY_RANKS`` ranks each has bars, and a bracket over each trunk's open time; above, each is a line of
    cells, paler where the rank waits for slower ones.
    """
    world_size = schedule.config.world_size
    begins = np.concatenate([[0.0], np.cumsum(schedule.slot_seconds.max(axis=0))])
    if world_size > MANY_RANKS:
        _draw_cells(axes, schedule, begins)
    else:
        _draw_bars(axes, schedule, begins)
        axes.set_yticks(range(world_size), [f"rank {rank}" for rank in range(world_size)])
    for kind, colour in OP_COLOURS.items():
        axes.broken_barh([], (0, 1), facecolors=colour, label=OP_NAMES[kind])
    axes.broken_barh([], (0, 1), facecolors=DUMMY_COLOUR, label="dummy")
    axes.set_ylim(world_size - 0.5, -0.6)
    axes.set_xlim(0, float(begins[-1]) or 1.0)
    axes.set_xlabel("estimated seconds" + ("" if world_size > MANY_RANKS else "; brackets: a trunk's states are kept"))
    balance = f", balance {count_world(schedule).balance:.2f}" if world_size > 1 else ""
    microbatches = counted(len(schedule.microbatches), "microbatch", "microbatches")
    title = f"{microbatches} on {counted(world_size, 'rank')}, {schedule.execution}{balance}"
    axes.set_title(title, fontsize=10, loc="left")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, fontsize=8, frameon=False)


def _draw_bars(axes: Axes, schedule: Schedule, begins: FloatArray) -> None:
    for rank in range(schedule.config.world_size):
        ops = schedule.ops(rank)
        for kind in "SFB":
            for dummy in (False, True):
                bars = [
                    (begins[i], schedule.op_seconds(op))
                    for i, op in enumerate(ops)
                    if op[0] == kind and (op[1] < 0) == dummy
                ]
                colour = DUMMY_COLOUR if dummy else OP_COLOURS[kind]
                axes.broken_barh(bars, (rank - 0.25, 0.5), facecolors=colour, edgecolors="white", linewidths=0.3)
        own = [i for i, op in enumerate(ops) if op[1] >= 0]
        lives = sorted(schedule.handoff_lives[rank], key=lambda life: (life[1], -life[2]))
        for level, (_, first, last) in enumerate(lives[:MAX_LABELS]):
            height = rank - 0.3 - 0.15 * (level % 8) / 8
            left, right = begins[own[first]], begins[own[last] + 1]
            axes.plot([left, left, right, right], [height + 0.02, height, height, height + 0.02], "k-", linewidth=0.5)


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
