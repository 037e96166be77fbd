"""What a recipe may say beside TRL's own settings."""

import json
from dataclasses import dataclass, field
from typing import Any

from trl import ScriptArguments

DICT_FIELDS = ("model_config", "environment_kwargs", "agent_kwargs")


@dataclass
class TrainArguments(ScriptArguments):
    r"""
    Arguments of `harts train`: the policy, and what its rollouts come from: an environment, with the places where
    conversations fork, or an agent.

    Parameters:
        model_type (`str`, *optional*):
            Architecture of a policy with random weights, such as `bailing_hybrid`; instead of `model_name_or_path`.
        model_config (`dict`, *optional*):
            Fields of that architecture's configuration that differ from its defaults. Vocabulary and special tokens
            are the tokenizer's.
        environment (`str`, *optional*):
            Dotted path of the environment's class, `package.module:Class`; either this or an agent.
        environment_kwargs (`dict`, *optional*):
            Keyword arguments for it.
        branching (`list[int]`, *optional*):
            Continuations at each fork; the product must be `num_generations`. By default all forks are before the
            first turn.
        fork_turns (`list[int]`, *optional*):
            Turns before which the forks happen, 0 the first; by default the first ones.
        max_turns (`int`, *optional*, defaults to `8`):
            Most turns of a conversation.
        max_turn_tokens (`int`, *optional*, defaults to `256`):
            Most tokens of a turn.
        reward_funcs (`list[str]`, *optional*):
            Dotted paths of reward functions; by default the reward of the environment or of the agent.
        cpu_threads (`int`, *optional*):
            Threads of one CPU operation; by default PyTorch's choice. Tiny models are faster with 1.
        agent (`str`, *optional*):
            Dotted path of an agent: a function, or a subclass of `harts_hf.rollouts.gateway.Agent`.
        agent_kwargs (`dict`, *optional*):
            Keyword arguments for it.
        agent_command (`list[str]`, *optional*):
            Program and arguments of an agent that is a command; instead of `agent`.
        agent_timeout (`float`, *optional*, defaults to `600.0`):
            Seconds that an agent may take for an episode.
        agent_concurrency (`int`, *optional*, defaults to `64`):
            Agents that run at a time.
    """

    model_type: str | None = field(
        default=None,
        metadata={"help": "Architecture of a policy with random weights (instead of model_name_or_path)."},
    )
    model_config: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Fields of that architecture's configuration that differ from its defaults (JSON)."},
    )
    environment: str | None = field(
        default=None, metadata={"help": "Dotted path of the environment's class, package.module:Class."}
    )
    environment_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Keyword arguments for the environment (JSON)."}
    )
    branching: list[int] | None = field(
        default=None,
        metadata={
            "help": "Continuations at each fork; the product must be num_generations. By default all forks are before "
            "the first turn."
        },
    )
    fork_turns: list[int] | None = field(
        default=None, metadata={"help": "Turns before which the forks happen, 0 the first; by default the first ones."}
    )
    max_turns: int = field(default=8, metadata={"help": "Most turns of a conversation."})
    max_turn_tokens: int = field(default=256, metadata={"help": "Most tokens of a turn."})
    reward_funcs: list[str] | None = field(
        default=None,
        metadata={"help": "Dotted paths of reward functions; by default the environment's or the agent's own reward."},
    )

    cpu_threads: int | None = field(
        default=None,
        metadata={"help": "Threads of one CPU operation; by default PyTorch's choice. Tiny models are faster with 1."},
    )
    agent: str | None = field(
        default=None,
        metadata={"help": "Dotted path of an agent, package.module:name: a function, or a subclass of Agent."},
    )
    agent_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Keyword arguments for the agent (JSON)."}
    )
    agent_command: list[str] | None = field(
        default=None, metadata={"help": "Program and arguments of an agent that is a command (instead of agent)."}
    )
    agent_timeout: float = field(default=600.0, metadata={"help": "Seconds that an agent may take for an episode."})
    agent_concurrency: int = field(default=64, metadata={"help": "Agents that run at a time."})

    def __post_init__(self) -> None:
        for name in DICT_FIELDS:
            setattr(self, name, _as_dict(getattr(self, name), name))
        self._check_source()
        if self.cpu_threads is not None and self.cpu_threads < 1:
            raise ValueError(f"expected cpu_threads of at least 1, got {self.cpu_threads}")

    def _check_source(self) -> None:
        sources = {name: getattr(self, name) for name in ("environment", "agent", "agent_command")}
        given = [name for name, value in sources.items() if value]
        if len(given) != 1:
            raise ValueError(
                f"expected one of environment, agent and agent_command, got {' and '.join(given) or 'none'}"
            )
        others = ("agent_kwargs",) if self.environment else ("environment_kwargs", "branching", "fork_turns")
        for name in others:
            if getattr(self, name):
                raise ValueError(f"expected no {name} beside {given[0]}, got {getattr(self, name)!r}")


def _as_dict(value: Any, name: str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"expected {name} to be JSON, got {value!r}: {error}") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"expected {name} to be a mapping, got {type(value).__name__}")
    return value
