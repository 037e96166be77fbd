"""Draws a rollout tree: segments as bars along depth, shared ones in one colour, rewards at the ends."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from harts_hf.tree import RolloutTree

FloatArray = NDArray[np.float64]

SHARED = "#5e3c99"
UNSHARED = "#b2abd2"
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
        raise ValueError(f"expected {tree.num_trajectories} rewards, one per trajectory, got {len(rewards)}")
    lines = num_lines(tree)
    figure = Figure(figsize=(10, min(24.0, max(2.5, 1.2 + 0.18 * lines))), layout="constrained")
    axes = figure.subplots()
    heights = draw_segments(axes, tree)
    if rewards is not None:
        draw_rewards(axes, tree, rewards, heights)
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
    width = float(np.clip(220 / max(1, num_lines(tree)), 0.8, 6.0))
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
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("depth (tokens)")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize=8, frameon=False)
    return heights


def num_lines(tree: RolloutTree) -> int:
    """Leaves of a tree, each of which is drawn on a line of its own."""
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


def draw_rewards(axes: Axes, tree: RolloutTree, rewards: Sequence[float | None], segment_heights: FloatArray) -> None:
    """A point where each trajectory ends, coloured by its reward; None is not drawn.

    Args:
        segment_heights: ``[S]``, as :func:`draw_segments` gives them.
    """
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
