"""The algorithms of `harts train`: the one table of trainers, their configurations, and what each cannot do."""

from dataclasses import dataclass
from typing import Any

from harts_hf.trainers import (
    TreeGMPOConfig,
    TreeGMPOTrainer,
    TreeGRPOConfig,
    TreeGRPOTrainer,
    TreePPOConfig,
    TreePPOTrainer,
    TreeRLOOConfig,
    TreeRLOOTrainer,
    TreeSFTConfig,
    TreeSFTTrainer,
)


@dataclass(frozen=True, kw_only=True)
class TrainerKind:
    """One algorithm.

    Attributes:
        trainer: the trainer's class.
        config: the class of its arguments.
        takes: which of TRL's arguments of rollouts its constructor has.
        instead: what to do where one is asked for that it has not.
        is_supervised: whether it trains on rows that are there already (``harts_hf.cli.supervised``): no rollouts,
            no rewards.
    """

    trainer: Any
    config: Any
    takes: tuple[str, ...] = ("rollout_func", "environment_factory", "tools")
    instead: str = ""
    is_supervised: bool = False

    def check(self, name: str, source: str | None, arguments: dict[str, Any]) -> None:
        """Checks that the trainer can take what a source of rollouts gives.

        Args:
            name: of the algorithm, as in the recipe.
            source: the recipe's key; None for TRL's own generation.
            arguments: for the trainer's constructor.

        Raises:
            ValueError: it has no such argument.
        """
        missing = [argument for argument in arguments if argument not in self.takes]
        if missing:
            raise ValueError(f"expected a trainer that takes {missing[0]} for {source or missing[0]}, got {name!r}: "
                             f"{self.instead}")  # fmt: skip


TRAINERS = {
    "grpo": TrainerKind(trainer=TreeGRPOTrainer, config=TreeGRPOConfig),
    "gmpo": TrainerKind(trainer=TreeGMPOTrainer, config=TreeGMPOConfig),
    "ppo": TrainerKind(trainer=TreePPOTrainer, config=TreePPOConfig),
    "rloo": TrainerKind(
        trainer=TreeRLOOTrainer,
        config=TreeRLOOConfig,
        takes=(),
        instead="TRL's RLOO samples completions of a data set's prompts (dataset_name) and nothing else; "
        "trainer: grpo with scale_rewards: none compares rewards without scaling",
    ),
    "sft": TrainerKind(
        trainer=TreeSFTTrainer,
        config=TreeSFTConfig,
        takes=(),
        instead="supervised training takes dataset_name or recorded_rollouts, rows that are there already",
        is_supervised=True,
    ),
}
