"""RLOO on rollout trees."""

from typing import Any

from trl import RLOOTrainer

from harts_hf.errors import UnsupportedModelError
from harts_hf.trainers.config import TreeRLOOConfig
from harts_hf.trainers.hooks import TreeHooks
from harts_hf.trainers.step import TreeStep


# TRL leaves its training_step untyped, so mypy finds it unlike TreeStep's.
class TreeRLOOTrainer(TreeHooks, RLOOTrainer, TreeStep):  # type: ignore[misc]
    """[`RLOOTrainer`] that computes every shared token once; see [`TreeGRPOTrainer`]. Its loss is per trajectory."""

    _tag_names = ["trl", "rloo", "harts"]  # noqa: RUF012 - TRL's own convention

    _config_class = TreeRLOOConfig
    router_loss = "computed"
    replays_old_routes = True

    def __init__(self, model: Any, reward_funcs: Any, args: Any = None, *more: Any, **kwargs: Any) -> None:
        if kwargs.pop("rollout_func", None) is not None:
            raise UnsupportedModelError(
                "expected no rollout_func for TreeRLOOTrainer (TRL's RLOOTrainer has none, and masks no tokens of an "
                "environment), got one: use TreeGRPOTrainer (scale_rewards='none' compares rewards without scaling)"
            )
        super().__init__(model, reward_funcs, args, *more, **kwargs)
