"""What a recipe may say beside TRL's own settings."""

import json
from dataclasses import dataclass, field
from typing import Any

from trl import ScriptArguments

from harts_hf.rollouts.forks import EARLY_ENDS

# Policies and the options that are theirs.
FORK_OPTIONS = {
    "turn": ("branching", "fork_turns", "early_ends"),
    "entropy": ("fork_roots",),
    "budget": ("fork_budget", "fork_roots"),
    "none": (),
}
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
        fork_policy (`str`, *optional*, defaults to `"turn"`):
            Where conversations fork: `"turn"` before chosen turns, `"entropy"` before the turns that the policy was
            least certain of, `"budget"` as early as a budget of tokens allows, `"none"` nowhere (docs/forks.md).
        branching (`list[int]`, *optional*):
            `turn`: continuations at each fork. By default all forks are before the first turn.
        fork_turns (`list[int]`, *optional*):
            `turn`: turns before which the forks happen, 0 the first; by default the first ones.
        early_ends (`str`, *optional*, defaults to `"repeat"`):
            `turn`: what becomes of the episodes of a conversation that is over before a fork: `"repeat"` returns it
            that many times, `"reroll"` samples others at the fork above.
        fork_roots (`int`, *optional*):
            `entropy` and `budget`: independent conversations at first; by default half of `num_generations` and 1.
        fork_budget (`int`, *optional*):
            `budget`: sampled tokens that the episodes of a prompt should take together, shared ones once.
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
    fork_policy: str = field(
        default="turn",
        metadata={
            "help": "Where conversations fork: before chosen turns ('turn'), before the least certain ones "
            "('entropy'), as early as a budget of tokens allows ('budget'), or nowhere ('none').",
            "choices": list(FORK_OPTIONS),
        },
    )
    branching: list[int] | None = field(
        default=None,
        metadata={"help": "turn: continuations at each fork. By default all forks are before the first turn."},
    )
    fork_turns: list[int] | None = field(
        default=None,
        metadata={"help": "turn: turns before which the forks happen, 0 the first; by default the first ones."},
    )
    early_ends: str | None = field(
        default=None,
        metadata={
            "help": "turn: a conversation that is over before a fork is returned for all episodes below it "
            "('repeat', the default), or others are sampled at the fork above ('reroll').",
            "choices": list(EARLY_ENDS),
        },
    )
    fork_roots: int | None = field(
        default=None,
        metadata={
            "help": "entropy, budget: independent conversations at first; by default half of num_generations, and 1."
        },
    )
    fork_budget: int | None = field(
        default=None,
        metadata={
            "help": "budget: sampled tokens that the episodes of a prompt should take together, shared ones once."
        },
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
        self._check_fork_options()
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

    def _check_fork_options(self) -> None:
        if self.fork_policy not in FORK_OPTIONS:
            raise ValueError(f"expected fork_policy to be one of {', '.join(FORK_OPTIONS)}, got {self.fork_policy!r}")
        # A recipe may keep its forks before turns while the command line tries another policy.
        for name in ("fork_budget", "fork_roots"):
            if getattr(self, name) is not None and name not in FORK_OPTIONS[self.fork_policy]:
                policies = " or ".join(policy for policy, options in FORK_OPTIONS.items() if name in options)
                raise ValueError(f"expected {name} with fork_policy {policies} only, got {self.fork_policy}")
        if self.fork_policy == "budget" and self.fork_budget is None:
            raise ValueError("expected fork_budget, a number of tokens, with fork_policy budget, got none")


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
