"""TRL trainers on rollout trees."""

from typing import TYPE_CHECKING, Any

from harts_hf.trainers.collator import TreeDataCollator
from harts_hf.trainers.config import TreeGRPOConfig, TreeRLOOConfig
from harts_hf.trainers.grpo import TreeGRPOTrainer
from harts_hf.trainers.ppo import TreePPOTrainer
from harts_hf.trainers.ppo_config import TreePPOConfig
from harts_hf.trainers.rloo import TreeRLOOTrainer
from harts_hf.trainers.sft import TreeSFTConfig, TreeSFTTrainer

if TYPE_CHECKING:
    from harts_hf.trainers.gmpo import TreeGMPOConfig as TreeGMPOConfig
    from harts_hf.trainers.gmpo import TreeGMPOTrainer as TreeGMPOTrainer

__all__ = [
    "TreeDataCollator",
    "TreeGMPOConfig",
    "TreeGMPOTrainer",
    "TreeGRPOConfig",
    "TreeGRPOTrainer",
    "TreePPOConfig",
    "TreePPOTrainer",
    "TreeRLOOConfig",
    "TreeRLOOTrainer",
    "TreeSFTConfig",
    "TreeSFTTrainer",
]


def __getattr__(name: str) -> Any:
    # TRL warns at the first import of its experimental part, which is for those who asked for it.
    if name in ("TreeGMPOConfig", "TreeGMPOTrainer"):
        from harts_hf.trainers import gmpo

        return getattr(gmpo, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
