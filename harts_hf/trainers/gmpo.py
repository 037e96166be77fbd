"""GMPO on rollout trees: the one module that imports an experimental trainer of TRL."""

from dataclasses import dataclass

from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from harts_hf.trainers.advantages import TreeAdvantages
from harts_hf.trainers.config import RolloutOptions
from harts_hf.trainers.episodes import TreeEpisodes
from harts_hf.trainers.hooks import TreeHooks
from harts_hf.trainers.off_policy import TreeOffPolicy
from harts_hf.trainers.step import TreeStep
from harts_hf.trainers.tree_options import TreeOptions


@dataclass
class TreeGMPOConfig(RolloutOptions, TreeOptions, GMPOConfig):
    r"""
    Configuration class for the [`TreeGMPOTrainer`]: every parameter of [`GMPOConfig`], those of [`TreeOptions`]
    and of [`RolloutOptions`].
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_tree_options()
        self.check_rollout_options()


# TRL leaves its training_step untyped, so mypy finds it unlike TreeStep's.
class TreeGMPOTrainer(TreeAdvantages, TreeOffPolicy, TreeEpisodes, TreeHooks, GMPOTrainer, TreeStep):  # type: ignore[misc]
    """[`GMPOTrainer`] that computes every shared token once; see [`TreeGRPOTrainer`]. Its loss is per trajectory."""

    _tag_names = ["trl", "gmpo", "harts"]  # noqa: RUF012 - TRL's own convention

    _config_class = TreeGMPOConfig
    router_loss = "absent"
    replays_engine_routes = replays_old_routes = True
    accepts_token_advantages = False
    _loss_is_mean_over = "rows"
    _clips_log_ratios = True
