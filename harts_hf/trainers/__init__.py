"""TRL trainers on rollout trees."""

from harts_hf.trainers.collator import TreeDataCollator
from harts_hf.trainers.config import TreeGRPOConfig
from harts_hf.trainers.grpo import TreeGRPOTrainer

__all__ = ["TreeDataCollator", "TreeGRPOConfig", "TreeGRPOTrainer"]
