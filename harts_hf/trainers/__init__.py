"""TRL trainers on rollout trees."""

from harts_hf.trainers.collator import TreeDataCollator
from harts_hf.trainers.config import TreeGMPOConfig, TreeGRPOConfig, TreeRLOOConfig
from harts_hf.trainers.gmpo import TreeGMPOTrainer
from harts_hf.trainers.grpo import TreeGRPOTrainer
from harts_hf.trainers.ppo import TreePPOTrainer
from harts_hf.trainers.ppo_config import TreePPOConfig
from harts_hf.trainers.rloo import TreeRLOOTrainer
from harts_hf.trainers.sft import TreeSFTConfig, TreeSFTTrainer

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
