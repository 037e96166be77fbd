"""The rollout tree, and how it is made of trajectories or of segments (NumPy only)."""

from harts_hf.tree.arrays import IntArray
from harts_hf.tree.rollout_tree import RolloutTree

__all__ = ["IntArray", "RolloutTree"]
