"""GMPO on rollout trees."""

from trl.experimental.gmpo import GMPOTrainer

from harts_hf.trainers.advantages import TreeAdvantages
from harts_hf.trainers.config import TreeGMPOConfig
from harts_hf.trainers.episodes import TreeEpisodes
from harts_hf.trainers.hooks import TreeHooks
from harts_hf.trainers.off_policy import TreeOffPolicy
from harts_hf.trainers.step import TreeStep


# TRL leaves its training_step untyped, so mypy finds it unlike TreeStep's.
class TreeGMPOTrainer(TreeAdvantages, TreeOffPolicy, TreeEpisodes, TreeHooks, GMPOTrainer, TreeStep):  # type: ignore[misc]
    """[`GMPOTrainer`] that computes every shared token once; see [`TreeGRPOTrainer`]. Its loss is per trajectory."""

    _tag_names = ["trl", "gmpo", "harts"]  # noqa: RUF012 - TRL's own convention

    _config_class = TreeGMPOConfig
    router_loss = "absent"
    replays_engine_routes = replays_old_routes = True
    _accepts_token_advantages = False
    _loss_is_mean_over = "rows"
