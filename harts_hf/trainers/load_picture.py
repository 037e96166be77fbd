"""Draws how much each expert of each layer had to do."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

MAX_LABELS = 40


def plot_expert_load(load: NDArray[np.float64], layers: Sequence[str], path: Path) -> None:
    """A heat map to ``path`` (the suffix says the format).

    Args:
        load: ``[L, E]`` choices by layer and expert; drawn in parts of each layer's mean.
        layers: names of the layers, from the top.
        path: the picture to write.
    """
    relative = load / np.maximum(load.mean(axis=1, keepdims=True), 1e-9)
    figure = Figure(figsize=(min(16, 3 + 0.08 * load.shape[1]), min(14, 1.6 + 0.25 * load.shape[0])), dpi=120)
    axes = figure.add_subplot()
    image = axes.imshow(relative, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0)
    every = -(-len(layers) // MAX_LABELS)
    axes.set_yticks(range(0, len(layers), every), [_short(name) for name in layers[::every]], fontsize=7)
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    axes.set_title("tokens to each expert / mean of the layer", fontsize=9)
    figure.colorbar(image, ax=axes)
    figure.tight_layout()
    figure.savefig(path)


def _short(name: str) -> str:
    """The number of the layer, where a name has one."""
    return next((part for part in name.split(".") if part.isdigit()), name)
