"""What a recipe may say about where rollouts come from."""

import json
from dataclasses import Field, dataclass, field
from typing import Any

from harts_hf.rollouts.forks import EARLY_ENDS

# Policies and the options that are theirs.
FORK_OPTIONS = {
    "turn": ("branching", "fork_turns", "early_ends"),
    "entropy": ("fork_roots",),
    "budget": ("fork_budget", "fork_roots"),
    "none": (),
}
FORKS = ("branching", "fork_turns", "early_ends", "fork_roots", "fork_budget")
# Sources of rollouts, and the options that are theirs besides; with none of them TRL samples completions of prompts.
SOURCES: dict[str, tuple[str, ...]] = {
    "environment": ("environment_kwargs", "collector_kwargs", *FORKS),
    "agent": ("agent_kwargs", "collector_kwargs"),
    "agent_command": ("collector_kwargs",),
    "environment_factory": ("environment_kwargs", "collector_kwargs", "tools", *FORKS),
    "rollout_func": (),
    "recorded_rollouts": ("recorded_kwargs",),
}
NO_SOURCE = ("tools",)
# Numbers with a default, and the sources that read them.
LIMITS = ("max_turns", "max_turn_tokens")
_AGENTS = ("agent", "agent_command")
READ_BY = {
    **dict.fromkeys(("agent_timeout", "agent_concurrency"), _AGENTS),
    **dict.fromkeys(LIMITS, ("environment", "environment_factory", *_AGENTS)),
}
# Each is checked; numbers with a default are not, since a recipe may say them for another source.
OPTIONS_OF_SOURCES = ("environment_kwargs", "agent_kwargs", "collector_kwargs", "recorded_kwargs", "tools", *FORKS)


@dataclass
class SourceArguments:
    r"""
    Arguments of `harts train` that say where rollouts come from: at most one of `environment`, `agent`,
    `agent_command`, `environment_factory`, `rollout_func` and `recorded_rollouts`. Without any, TRL samples
    completions of the data set's prompts, with `tools` if there are some. Dotted paths are `package.module:Name`, of
    modules that are installed, in the current folder or on `PYTHONPATH`.

    Parameters:
        environment (`str`, *optional*):
            Dotted path of a subclass of `harts_hf.rollouts.Environment`.
        environment_kwargs (`dict`, *optional*):
            Keyword arguments for `environment` or `environment_factory`.
        agent (`str`, *optional*):
            Dotted path of an agent: a function, or a subclass of `harts_hf.rollouts.gateway.Agent`.
        agent_kwargs (`dict`, *optional*):
            Keyword arguments for it.
        agent_command (`list[str]`, *optional*):
            Program and arguments of an agent that is a command.
        agent_timeout (`float`, *optional*, defaults to `600.0`):
            Seconds that an agent may take for an episode.
        agent_concurrency (`int`, *optional*, defaults to `64`):
            Agents that run at a time.
        collector_kwargs (`dict`, *optional*):
            Further options of what collects: `harts_hf.rollouts.TreeRolloutCollector` for environments,
            `harts_hf.rollouts.AgentRolloutCollector` for agents.
        environment_factory (`str`, *optional*):
            Dotted path of what TRL calls by that name: a class (or a function that makes an object) whose methods are
            the policy's tools. Its conversations do not fork unless an option of forks is given.
        tools (`list[str]`, *optional*):
            Dotted paths of functions that the policy may call as tools in TRL's own loop.
        rollout_func (`str`, *optional*):
            Dotted path of a function as TRL's trainers take it.
        recorded_rollouts (`str`, *optional*):
            File of recorded rollouts to train on (docs/formats.md).
        recorded_kwargs (`dict`, *optional*):
            Options of `harts_hf.rollouts.RecordedRollouts`, such as `{"logprobs": "rescored"}`; with `trainer: sft`
            those of `harts_hf.rollouts.supervised_dataset`, such as `{"weight": "best"}`.
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
            Most turns of a conversation with an environment or an agent.
        max_turn_tokens (`int`, *optional*, defaults to `256`):
            Most tokens of such a turn.
        reward_funcs (`list[str]`, *optional*):
            Dotted paths of reward functions; by default the reward of the environment, the agent or the file.
    """

    environment: str | None = field(
        default=None, metadata={"help": "Dotted path of the environment's class, package.module:Class."}
    )
    environment_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Keyword arguments for environment or environment_factory (JSON)."}
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
    collector_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Further options of TreeRolloutCollector, or for agents of AgentRolloutCollector (JSON)."},
    )
    environment_factory: str | None = field(
        default=None,
        metadata={"help": "Dotted path of TRL's environment_factory: its methods are the policy's tools."},
    )
    tools: list[str] | None = field(
        default=None, metadata={"help": "Dotted paths of functions that the policy may call as tools in TRL's loop."}
    )
    rollout_func: str | None = field(
        default=None, metadata={"help": "Dotted path of a rollout function as TRL's trainers take it."}
    )
    recorded_rollouts: str | None = field(
        default=None, metadata={"help": "File of recorded rollouts to train on (docs/formats.md)."}
    )
    recorded_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": 'Options of RecordedRollouts, such as {"logprobs": "rescored"} (JSON).'}
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
        metadata={
            "help": "Dotted paths of reward functions; by default the environment's, the agent's or the file's reward."
        },
    )

    @property
    def source(self) -> str | None:
        """The key that says where rollouts come from; None where TRL samples completions of prompts."""
        return next((name for name in SOURCES if getattr(self, name)), None)

    @property
    def asks_for_forks(self) -> bool:
        """Whether an option says that conversations should fork."""
        return self.fork_policy in ("entropy", "budget") or any(getattr(self, name) for name in FORKS)

    def changes(self, option: Field[Any]) -> bool:
        """Whether an option has another value than its default."""
        return bool(getattr(self, option.name) != option.default)

    def check_source(self) -> None:
        """Raises ValueError for several sources, or options of another one."""
        given = [name for name in SOURCES if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"expected one of {', '.join(SOURCES)} at most, got {' and '.join(given)}")
        allowed = SOURCES[given[0]] if given else NO_SOURCE
        for name in OPTIONS_OF_SOURCES:
            if getattr(self, name) and name not in allowed:
                beside = f"beside {given[0]}" if given else f"without {' or '.join(_sources_with(name))}"
                raise ValueError(f"expected no {name} {beside}, got {getattr(self, name)!r}")
        if self.fork_policy in ("entropy", "budget") and "branching" not in allowed:
            beside = f"beside {given[0]}" if given else f"without {' or '.join(_sources_with('branching'))}"
            raise ValueError(f"expected no fork_policy {beside}, got {self.fork_policy!r}")

    def check_forks(self) -> None:
        """Raises ValueError for options of forks that contradict one another."""
        if self.fork_policy not in FORK_OPTIONS:
            raise ValueError(f"expected fork_policy to be one of {', '.join(FORK_OPTIONS)}, got {self.fork_policy!r}")
        # A recipe may keep its forks before turns while the command line tries another policy.
        for name in ("fork_budget", "fork_roots"):
            if getattr(self, name) is not None and name not in FORK_OPTIONS[self.fork_policy]:
                policies = " or ".join(policy for policy, options in FORK_OPTIONS.items() if name in options)
                raise ValueError(f"expected {name} with fork_policy {policies} only, got {self.fork_policy}")
        if self.fork_policy == "budget" and self.fork_budget is None:
            raise ValueError("expected fork_budget, a number of tokens, with fork_policy budget, got none")


def _sources_with(option: str) -> list[str]:
    return [source for source, options in SOURCES.items() if option in options]


def as_dict(value: Any, name: str) -> dict[str, Any]:
    """A mapping that a recipe holds, or the command line as JSON; empty for None.

    Raises:
        ValueError: anything else.
    """
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
