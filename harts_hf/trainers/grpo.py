"""GRPO on rollout trees."""

from trl import GRPOTrainer

from harts_hf.trainers.advantages import TreeAdvantages
from harts_hf.trainers.config import TreeGRPOConfig
from harts_hf.trainers.episodes import TreeEpisodes
from harts_hf.trainers.hooks import TreeHooks
from harts_hf.trainers.off_policy import TreeOffPolicy
from harts_hf.trainers.step import TreeStep


# TRL leaves its training_step untyped, so mypy finds it unlike TreeStep's.
class TreeGRPOTrainer(TreeAdvantages, TreeOffPolicy, TreeEpisodes, TreeHooks, GRPOTrainer, TreeStep):  # type: ignore[misc]
    """[`GRPOTrainer`] that computes every token shared by the trajectories of an optimizer step once.

    Loss, gradients and metrics are TRL's own on the same trajectories: its loss functions run unchanged on log-probs
    that a tree forward computed. Constructor arguments are [`GRPOTrainer`]'s, with a [`TreeGRPOConfig`]; a plain
    [`GRPOConfig`] is refused, since the tree options would be missing. Metrics ``tree/*`` stand beside TRL's.

    Raises:
        UnsupportedModelError: a model or a setting that tree training would get wrong; the message names it.
    """

    _tag_names = ["trl", "grpo", "harts"]  # noqa: RUF012 - TRL's own convention

    _config_class = TreeGRPOConfig
    router_loss = "computed"
    replays_engine_routes = replays_old_routes = True
