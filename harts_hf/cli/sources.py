"""Where a recipe's rollouts come from: what the trainer is given for it, its reward, prompts and tokenizer."""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

from harts_hf.cli.source_arguments import FORK_OPTIONS, LIMITS, READ_BY
from harts_hf.cli.train_arguments import TrainArguments
from harts_hf.rollouts.collector import TreeRolloutCollector, environment_reward
from harts_hf.rollouts.environment import Environment, load_object
from harts_hf.rollouts.forks import EARLY_ENDS, EarlyEnds, ForkPolicy, NoForks, TurnForks
from harts_hf.rollouts.growing_forks import BudgetForks, EntropyForks


@dataclass(frozen=True, kw_only=True)
class RolloutSource:
    """What a trainer is built with.

    Attributes:
        arguments: of the trainer's constructor: ``rollout_func``, ``environment_factory``, ``tools``.
        reward: the reward function where the recipe names none; None where TRL knows one, or none is known.
        task: has ``prompts()`` and ``tokenizer()``, and may have ``eval_prompts()``; None if nobody does.
        make_dataset: makes the training data set where the recipe names none and there is no task.
        plays_itself: a TRL environment owns its prompts: a data set may be left out.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    reward: Any = None
    task: Any = None
    make_dataset: Callable[[], Any] | None = None
    plays_itself: bool = False

    @property
    def collector(self) -> Any:
        """The rollout function, if there is one."""
        return self.arguments.get("rollout_func")

    def check(self, training: Any, tokenizer: Any = None) -> None:
        """Checks the source against the trainer's arguments and the policy's tokenizer, if it has one already.

        Raises:
            ValueError: it cannot give what they ask for; a tokenizer without a known chat format; groups that would be
                split over processes.
        """
        check = getattr(self.collector, "check", None)
        if check is not None:
            check(training)
        check = getattr(self.collector, "check_tokenizer", None)
        if check is not None and tokenizer is not None:
            check(tokenizer, use_vllm=training.use_vllm)
        rows = training.per_device_train_batch_size * training.steps_per_generation
        if getattr(self.collector, "uses_engine", False) and rows % training.num_generations:
            raise ValueError(
                "expected per_device_train_batch_size times steps_per_generation (gradient_accumulation_steps unless "
                f"set) to be a multiple of num_generations, so that each process samples whole groups, got "
                f"{training.per_device_train_batch_size} x {training.steps_per_generation} rollouts and groups of "
                f"{training.num_generations}"
            )


def find_source(arguments: TrainArguments, training: Any, tokenizer: Any) -> RolloutSource:
    """The source that a recipe names.

    Args:
        arguments: the recipe's.
        training: the trainer's arguments.
        tokenizer: of the policy, if it has a name; recorded conversations need it.

    Raises:
        ValueError: a dotted path that leads nowhere or to something else; keyword arguments that do not fit; an extra
            that is not installed.
    """
    makers: dict[str | None, Callable[[], RolloutSource]] = {
        None: lambda: RolloutSource(arguments=_tools(arguments)),
        "environment": lambda: _environment(arguments, training),
        "environment_factory": lambda: _environment_factory(arguments, training),
        "agent": lambda: _agent(arguments),
        "agent_command": lambda: _agent(arguments),
        "rollout_func": lambda: RolloutSource(
            arguments={"rollout_func": load_callable("rollout_func", arguments.rollout_func, "a rollout function")}
        ),
        "recorded_rollouts": lambda: _recorded(arguments, tokenizer),
    }
    _say_unused(arguments)
    return makers[arguments.source]()


def _say_unused(arguments: TrainArguments) -> None:
    """A line on stderr that names numbers which the source does not read: a recipe may keep those of another one."""
    source = arguments.source or "prompts"
    unused = [
        option.name
        for option in fields(arguments)
        if option.name in READ_BY and source not in READ_BY[option.name] and arguments.changes(option)
    ]
    if source == "environment_factory" and not arguments.asks_for_forks:
        unused += [option.name for option in fields(arguments) if option.name in LIMITS and arguments.changes(option)]
        source += ", which TRL plays (max_tool_calling_iterations limits it)"
    if unused:
        print(f"{' and '.join(unused)} {'is' if len(unused) == 1 else 'are'} not used with {source}", file=sys.stderr)


def reward_functions(arguments: TrainArguments, source: RolloutSource) -> list[Any]:
    """The recipe's reward functions, or the source's own; empty where TRL's environments may bring one.

    Raises:
        ValueError: a path that leads to no function; no reward at all.
    """
    named = [
        load_callable("reward_funcs", path, "a function that returns rewards") for path in arguments.reward_funcs or ()
    ]
    if named or source.reward is not None:
        return named or [source.reward]
    if not source.plays_itself or source.collector is not None:
        raise ValueError(
            "expected reward_funcs, dotted paths of reward functions, where rollouts come from "
            f"{arguments.source or 'prompts'}, got none"
        )
    return []


def _environment(arguments: TrainArguments, training: Any) -> RolloutSource:
    environment = _load("environment", arguments.environment, "a subclass of Environment")
    if not (isinstance(environment, type) and issubclass(environment, Environment)):
        raise ValueError(
            f"expected environment to be a subclass of Environment, got {environment!r}: a function that makes one is "
            "for collectors in Python; a recipe names a class (yours, GymTextEnvironment, ...), and its arguments in "
            "environment_kwargs"
        )
    return _forking(functools.partial(environment, **cast(dict, arguments.environment_kwargs)), arguments, training)


def _forking(make: Callable[[], Any], arguments: TrainArguments, training: Any) -> RolloutSource:
    task = _made(make, arguments)
    collector = _collector(
        TreeRolloutCollector,
        arguments,
        make,
        fork_policy=_fork_policy(arguments, training.num_generations),
        max_turns=arguments.max_turns,
        max_turn_tokens=arguments.max_turn_tokens,
    )
    return RolloutSource(arguments={"rollout_func": collector}, reward=environment_reward, task=task)


def _environment_factory(arguments: TrainArguments, training: Any) -> RolloutSource:
    factory = load_callable("environment_factory", arguments.environment_factory, "a class with reset, or a function")
    make = functools.partial(factory, **cast(dict, arguments.environment_kwargs))
    if arguments.asks_for_forks:
        return _forked_factory(make, arguments, training)
    if arguments.collector_kwargs:
        raise ValueError(
            "expected no collector_kwargs where TRL plays its environments itself, got "
            f"{arguments.collector_kwargs}: an option of forks (branching, ...) has them collected as trees"
        )
    _made(make, arguments)
    return RolloutSource(arguments={"environment_factory": make, **_tools(arguments)}, plays_itself=True)


def _forked_factory(factory: Callable[[], Any], arguments: TrainArguments, training: Any) -> RolloutSource:
    """TRL's environment, and tools, as an environment of ours, which forks."""
    from harts_hf.rollouts.environments.tools import ToolEnvironment

    inner = _made(factory, arguments)
    make = functools.partial(ToolEnvironment, factory, tools=_tools(arguments).get("tools", ()))
    source = _forking(make, arguments, training)
    reward = source.reward if callable(getattr(inner, "get_reward", None)) else None
    return replace(source, reward=reward, task=None, plays_itself=True)


def _made(make: Callable[[], Any], arguments: TrainArguments) -> Any:
    path = arguments.environment or arguments.environment_factory
    _check_defined(path, getattr(make, "func", make))
    try:
        return make()
    except TypeError as error:  # a keyword argument that the class does not know
        raise ValueError(f"environment_kwargs do not fit {path}: {error}") from error


def _check_defined(path: str | None, kind: Any) -> None:
    # Python's own error is a TypeError, as of a wrong keyword argument.
    missing = sorted(getattr(kind, "__abstractmethods__", ()))
    if missing:
        raise ValueError(f"expected {path} to define {' and '.join(missing)}, got a class without")


def _tools(arguments: TrainArguments) -> dict[str, Any]:
    tools = [load_callable("tools", path, "a function with a docstring") for path in arguments.tools or ()]
    return {"tools": tools} if tools else {}


def _agent(arguments: TrainArguments) -> RolloutSource:
    from harts_hf.rollouts.gateway import AgentRolloutCollector, agent_reward  # whose web server is an extra

    if arguments.agent_command:
        agent: Any = arguments.agent_command
    else:
        kwargs = cast(dict, arguments.agent_kwargs)
        agent = _load("agent", arguments.agent, "a function, or a subclass of Agent")
        _check_defined(arguments.agent, agent)
        if isinstance(agent, type) or kwargs:
            try:
                make = agent if isinstance(agent, type) else functools.partial(functools.partial, agent)
                agent = make(**kwargs)
            except TypeError as error:  # a keyword argument that the class does not know
                raise ValueError(f"agent_kwargs do not fit {arguments.agent}: {error}") from error
    collector = _collector(
        AgentRolloutCollector,
        arguments,
        agent,
        max_turns=arguments.max_turns,
        max_turn_tokens=arguments.max_turn_tokens,
        timeout=arguments.agent_timeout,
        max_concurrent=arguments.agent_concurrency,
    )
    return RolloutSource(arguments={"rollout_func": collector}, reward=agent_reward, task=collector.agent)


def _collector(kind: Any, arguments: TrainArguments, played: Any, **options: Any) -> Any:
    """A collector with the recipe's ``collector_kwargs``, which may say once more what keys of their own say."""
    more = cast(dict, arguments.collector_kwargs)
    try:
        return kind(played, **{**options, **more})
    except TypeError as error:  # an option that it does not know
        raise ValueError(f"collector_kwargs do not fit {kind.__name__}: {error}") from error


def _recorded(arguments: TrainArguments, tokenizer: Any) -> RolloutSource:
    from harts_hf.rollouts import RecordedRollouts, recorded_reward

    kwargs = cast(dict, arguments.recorded_kwargs)
    try:
        recorded = RecordedRollouts(arguments.recorded_rollouts, tokenizer=tokenizer, **kwargs)
    except TypeError as error:
        raise ValueError(f"recorded_kwargs do not fit RecordedRollouts: {error}") from error
    return RolloutSource(arguments={"rollout_func": recorded}, reward=recorded_reward, make_dataset=recorded.dataset)


def _fork_policy(arguments: TrainArguments, num_generations: int) -> ForkPolicy:
    unused = [name for name in FORK_OPTIONS["turn"] if getattr(arguments, name) is not None]
    if unused and arguments.fork_policy != "turn":
        print(f"fork_policy {arguments.fork_policy} does not use {' and '.join(unused)}", file=sys.stderr)
    if arguments.fork_policy == "none":
        return NoForks()
    if arguments.fork_policy == "entropy":
        return EntropyForks(roots=arguments.fork_roots)
    if arguments.fork_policy == "budget":
        assert arguments.fork_budget is not None
        return BudgetForks(tokens=arguments.fork_budget, roots=arguments.fork_roots)
    branching = tuple(arguments.branching or [num_generations])
    fork_turns = tuple(range(len(branching)) if arguments.fork_turns is None else arguments.fork_turns)
    early_ends = cast(EarlyEnds, arguments.early_ends or EARLY_ENDS[0])
    return TurnForks(branching=branching, fork_turns=fork_turns, early_ends=early_ends)


def load_callable(field_name: str, path: str | None, what: str) -> Any:
    """What a dotted path names.

    Args:
        field_name: of the recipe, for messages.
        path: ``package.module:Name``.
        what: it should be, for messages.

    Raises:
        ValueError: it leads nowhere, or to something that cannot be called.
    """
    function = _load(field_name, path, what)
    if not callable(function):
        raise ValueError(f"expected {field_name} to name functions, got {function!r} (from {path!r})")
    return function


def _load(field_name: str, path: str | None, what: str) -> Any:
    assert path is not None
    try:
        return load_object(path)
    except ValueError as error:
        raise ValueError(
            f"expected {field_name} to be the dotted path of {what}, package.module:Name, of a module that is "
            f"installed, in the current folder or on PYTHONPATH: {error}"
        ) from error
