"""RLOO on rollout trees."""

from trl import RLOOTrainer

from harts_hf.trainers.config import TreeRLOOConfig
from harts_hf.trainers.hooks import TreeHooks
from harts_hf.trainers.step import TreeStep


# TRL leaves its training_step untyped, so mypy finds it unlike TreeStep's.
class TreeRLOOTrainer(TreeHooks, RLOOTrainer, TreeStep):  # type: ignore[misc]
    """[`RLOOTrainer`] that computes every shared token once; see [`TreeGRPOTrainer`]. Its loss is per trajectory."""

    _tag_names = ["trl", "rloo", "harts"]  # noqa: RUF012 - TRL's own convention

    _config_class = TreeRLOOConfig
