"""Pictures of trees: they are drawn, and their parts say what the tree says."""

import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from harts_hf.rollouts.plot import draw_segments, plot_tree
from harts_hf.tree import RolloutTree

TREE = RolloutTree.from_shape([-1, 0, 0, 1, 1], [10, 5, 6, 7, 8], [1, 2, 3, 4, 4])


def test_bars_cover_every_token_once():
    """Shared and unshared bars together are as long as the tree has tokens; shared ones where counts exceed 1."""
    axes = Figure().subplots()
    draw_segments(axes, TREE)
    lengths = {
        bars.get_label(): sum(abs(np.diff(segment[:, 0]).item()) for segment in bars.get_segments())
        for bars in axes.collections
        if isinstance(bars, LineCollection) and not bars.get_label().startswith("_")
    }
    shared = int((TREE.occurrence_counts > 1).sum())
    assert lengths == {"shared": shared, "one trajectory": TREE.num_tokens - shared}


@pytest.mark.parametrize("rewards", [None, [0, 1, 0.5, None, 1], [None] * 5])
def test_tree_is_drawn(tmp_path, rewards):
    """With rewards, with some, with none."""
    plot_tree(TREE, rewards, tmp_path / "tree.png")
    assert (tmp_path / "tree.png").stat().st_size > 5000


def test_wrong_number_of_rewards(tmp_path):
    """One reward per trajectory, or an error."""
    with pytest.raises(ValueError, match="expected 5 rewards, one per trajectory, got 2"):
        plot_tree(TREE, [1, 2], tmp_path / "tree.png")
