"""Collects rollout trees: environments that fork, the sampler, TRL's ``rollout_func``, credit."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harts_hf.rollouts.collector import TreeRolloutCollector as TreeRolloutCollector
    from harts_hf.rollouts.collector import environment_reward as environment_reward
    from harts_hf.rollouts.environment import ChatEnvironment as ChatEnvironment
    from harts_hf.rollouts.environment import Environment as Environment
    from harts_hf.rollouts.environment import StepResult as StepResult
    from harts_hf.rollouts.environments.failures import EpisodesFailedError as EpisodesFailedError
    from harts_hf.rollouts.environments.gym import GymTextEnvironment as GymTextEnvironment
    from harts_hf.rollouts.environments.replay import ReplayedEnvironment as ReplayedEnvironment
    from harts_hf.rollouts.environments.tools import ToolEnvironment as ToolEnvironment
    from harts_hf.rollouts.forks import ForkPolicy as ForkPolicy
    from harts_hf.rollouts.forks import NoForks as NoForks
    from harts_hf.rollouts.forks import TurnForks as TurnForks
    from harts_hf.rollouts.gateway import AgentRolloutCollector as AgentRolloutCollector
    from harts_hf.rollouts.gateway import agent_reward as agent_reward
    from harts_hf.rollouts.growing_forks import BudgetForks as BudgetForks
    from harts_hf.rollouts.growing_forks import EntropyForks as EntropyForks
    from harts_hf.rollouts.recorded_rollouts import RecordedRollouts as RecordedRollouts
    from harts_hf.rollouts.recorded_rollouts import recorded_reward as recorded_reward
    from harts_hf.rollouts.supervised import supervised_dataset as supervised_dataset

# Names are resolved on first use: readers of rollout files need no torch, and only agents need the extra `agents`.
_HOMES = {
    "BudgetForks": "growing_forks",
    "ChatEnvironment": "environment",
    "EntropyForks": "growing_forks",
    "Environment": "environment",
    "EpisodesFailedError": "environments.failures",
    "ForkPolicy": "forks",
    "GymTextEnvironment": "environments.gym",
    "NoForks": "forks",
    "RecordedRollouts": "recorded_rollouts",
    "ReplayedEnvironment": "environments.replay",
    "StepResult": "environment",
    "ToolEnvironment": "environments.tools",
    "TreeRolloutCollector": "collector",
    "TurnForks": "forks",
    "environment_reward": "collector",
    "supervised_dataset": "supervised",
    "recorded_reward": "recorded_rollouts",
}
_HOMES_IN_EXTRAS = {"AgentRolloutCollector": "gateway", "agent_reward": "gateway"}

__all__ = sorted(_HOMES)  # without the extras, so that `import *` works where they are not installed


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name) or _HOMES_IN_EXTRAS.get(name)
    if home is None:
        raise AttributeError(f"module 'harts_hf.rollouts' has no attribute {name!r}")
    return getattr(import_module(f"harts_hf.rollouts.{home}"), name)


def __dir__() -> list[str]:
    return sorted((*globals(), *_HOMES, *_HOMES_IN_EXTRAS))
