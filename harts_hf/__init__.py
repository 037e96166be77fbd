"""Train RL agents on rollout trees: every shared token computed once, forward and backward, on hybrid models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harts_hf.errors import UnsupportedModelError as UnsupportedModelError
    from harts_hf.modeling import patch as patch
    from harts_hf.modeling import unpatch as unpatch
    from harts_hf.planner import PlannerConfig as PlannerConfig
    from harts_hf.planner import Schedule as Schedule
    from harts_hf.planner import min_linear_calls as min_linear_calls
    from harts_hf.planner import plan_window as plan_window
    from harts_hf.runtime import tree_logprobs as tree_logprobs
    from harts_hf.trainers import TreeDataCollator as TreeDataCollator
    from harts_hf.trainers import TreeGMPOConfig as TreeGMPOConfig
    from harts_hf.trainers import TreeGMPOTrainer as TreeGMPOTrainer
    from harts_hf.trainers import TreeGRPOConfig as TreeGRPOConfig
    from harts_hf.trainers import TreeGRPOTrainer as TreeGRPOTrainer
    from harts_hf.trainers import TreePPOConfig as TreePPOConfig
    from harts_hf.trainers import TreePPOTrainer as TreePPOTrainer
    from harts_hf.trainers import TreeRLOOConfig as TreeRLOOConfig
    from harts_hf.trainers import TreeRLOOTrainer as TreeRLOOTrainer
    from harts_hf.trainers import TreeSFTConfig as TreeSFTConfig
    from harts_hf.trainers import TreeSFTTrainer as TreeSFTTrainer
    from harts_hf.tree import RolloutTree as RolloutTree

# Names are resolved on first use, so that planning and `harts --help` need no torch.
_HOMES = {
    "RolloutTree": "tree",
    "min_linear_calls": "planner",
    "PlannerConfig": "planner",
    "plan_window": "planner",
    "Schedule": "planner",
    "patch": "modeling",
    "unpatch": "modeling",
    "UnsupportedModelError": "errors",
    "tree_logprobs": "runtime",
    "TreeDataCollator": "trainers",
    "TreeGRPOConfig": "trainers",
    "TreeGRPOTrainer": "trainers",
    "TreeGMPOConfig": "trainers",
    "TreeGMPOTrainer": "trainers",
    "TreePPOConfig": "trainers",
    "TreePPOTrainer": "trainers",
    "TreeRLOOConfig": "trainers",
    "TreeRLOOTrainer": "trainers",
    "TreeSFTConfig": "trainers",
    "TreeSFTTrainer": "trainers",
}

__all__ = sorted(_HOMES)
__version__ = "0.1.0.dev0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'harts_hf' has no attribute {name!r}")
    return getattr(import_module(f"harts_hf.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
