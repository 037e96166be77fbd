"""TRL's environments (``environment_factory``) and ``tools``, as an environment that forks.

TRL's trainers call tools in a linear loop. Here a turn is parsed, its calls are made and their results written as in
that loop, but the state between two turns can be forked.
"""

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Self

from trl.trainer.utils import start_event_loop_in_daemon

from harts_hf.rollouts.environment import ChatEnvironment, Message, StepResult, copied, loaded
from harts_hf.rollouts.environments.failures import ContractError
from harts_hf.rollouts.fields import shortened

# Methods of a TRL environment that are no tools.
_NO_TOOLS = ("reset", "get_reward")
TrlFactory = Callable[[], Any]


class ToolEnvironment(ChatEnvironment):
    """Plays a TRL environment, tools, or both: the episode is over at the first turn without a tool call.

    Example::

        class Counter:  # as TRL's trainers take it
            def reset(self, **row):
                self.count = 0

            def add(self, number: int) -> str:
                \"\"\"Adds to the count.

                Args:
                    number: What to add.
                \"\"\"
                self.count += number
                return str(self.count)

            def get_reward(self) -> float:
                return float(self.count == 7)

        collector = TreeRolloutCollector(lambda: ToolEnvironment(Counter), branching=(4, 2), ...)

    As in TRL, the public methods but ``reset`` and ``get_reward`` are tools; ``reset`` gets the dataset row's columns
    (and ``seed``, if it has a parameter of that name) and may return a text that follows the prompt; a tool's
    exception is its answer to the policy, ``{"error": ...}``. Methods may be coroutines. Without ``get_reward`` the
    reward is that of the trainer's reward functions, which get the TRL environments as ``environments``.

    A fork copies the TRL environment deeply; ``tools`` are shared. For one that cannot be copied there is
    :class:`~harts_hf.rollouts.ReplayedEnvironment`.

    Args:
        environment_factory: makes a TRL environment, or a mapping of such by the dataset's column ``environment``;
            dotted paths will do.
        tools: functions that do not belong to an environment; likewise.

    Raises:
        ValueError: neither, or a dotted path that leads nowhere.
    """

    def __init__(
        self,
        environment_factory: TrlFactory | Mapping[str, TrlFactory] | str | None = None,
        *,
        tools: Sequence[Callable[..., Any] | str] = (),
    ) -> None:
        if environment_factory is None and not tools:
            raise ValueError("expected an environment_factory, tools, or both, got neither")
        self._factory = _loaded(environment_factory)
        self._own_tools = [loaded(tool) for tool in tools]
        self._inner: Any = None

    @property
    def tools(self) -> list[Any]:  # type: ignore[override]
        """The tools on offer: standalone ones, then the TRL environment's methods by name."""
        return [*self._own_tools, *_methods(self._inner)]

    @property
    def offers_tools(self) -> bool:
        """Whether there are standalone tools, or a TRL environment with methods."""
        factories = self._factory.values() if isinstance(self._factory, Mapping) else [self._factory]
        return bool(self.tools) or any(_has_methods(factory) for factory in factories if factory is not None)

    @property
    def has_reward(self) -> bool:  # type: ignore[override]
        """Whether the TRL environment has ``get_reward``."""
        return callable(getattr(type(self._inner), "get_reward", None))

    def begin(self, row: Mapping[str, Any], *, seed: int) -> list[Message]:
        """Makes and resets the TRL environment.

        Returns:
            The row's prompt; what ``reset`` returned is added to its last message, as TRL does.
        """
        prompt = row.get("prompt", "")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if self._factory is None:
            return messages
        factory, columns = self._factory, dict(row)
        if isinstance(factory, Mapping):
            name = columns.pop("environment", None)
            if name not in factory:
                raise ValueError(f"expected a column environment of {', '.join(factory)}, got {shortened(name)}")
            factory = factory[name]
        self._inner = factory()
        parameters = inspect.signature(self._inner.reset).parameters
        if "seed" in parameters and "seed" not in columns:
            columns["seed"] = seed
        observation = self._inner.reset(**columns)
        if observation is None:
            return messages
        return [*messages[:-1], {**messages[-1], "content": _joined(messages[-1]["content"], observation)}]

    def reset(self, prompt: Any, *, seed: int) -> list[Message]:
        """:meth:`begin` with a row of the prompt alone."""
        return self.begin({"prompt": prompt}, seed=seed)

    def step(self, action: Message) -> StepResult:
        """Makes the calls of a turn; over if there are none."""
        calls = action.get("tool_calls") or []
        if not calls:
            return StepResult("", done=True)
        tools = {tool.__name__: tool for tool in self.tools}
        at_once: list[Message] = []
        later: list[Message] = []
        for call in calls:
            # TRL's order: what it awaits comes last.
            waits = inspect.iscoroutinefunction(tools.get(_name_of(call)))
            (later if waits else at_once).append(call)
        results = [_result(call, tools) for call in at_once]
        if later:
            results += _awaited(_all(later, tools))
        return StepResult([_tool_message(name, result) for name, result in results], done=False)

    @property
    def reward(self) -> float | None:
        """What ``get_reward`` returns."""
        if not self.has_reward:
            return None
        reward = self._inner.get_reward()
        if inspect.iscoroutine(reward):
            reward = _awaited(reward)
        return reward

    def fork(self) -> Self:
        """A copy with a deep copy of the TRL environment."""
        twin = object.__new__(type(self))
        twin._factory, twin._own_tools = self._factory, self._own_tools
        twin._inner = copied(self._inner)
        return twin

    def for_rewards(self) -> Any:
        """The TRL environment."""
        return self._inner

    def close(self) -> None:
        """Calls the TRL environment's ``_close``, if it has one (a ``close`` would be a tool)."""
        close = getattr(self._inner, "_close", None)
        if callable(close):
            close()


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """One for all coroutines, so that what they hold stays usable from call to call; in a thread, as TRL's."""
    _, loop, is_ready = start_event_loop_in_daemon(name="ToolEnvironment")
    is_ready.wait()
    return loop


def _awaited(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run_coroutine_threadsafe(coroutine, _loop()).result()


def _loaded(given: Any) -> Any:
    if isinstance(given, Mapping):
        return {name: loaded(entry) for name, entry in given.items()}
    return loaded(given)


def _has_methods(factory: TrlFactory) -> bool:
    if isinstance(factory, type):
        return bool(_method_names(factory))
    inner = factory()
    close = getattr(inner, "_close", None)
    if callable(close):
        close()
    return bool(_method_names(type(inner)))


def _methods(inner: Any) -> list[Any]:
    """The public methods, by name; from the class, because looking at the instance would evaluate properties."""
    return [] if inner is None else [getattr(inner, name) for name in _method_names(type(inner))]


def _method_names(kind: type) -> list[str]:
    found = inspect.getmembers(kind, predicate=inspect.isfunction)
    return [name for name, _ in found if name not in _NO_TOOLS and not name.startswith("_")]


def _name_of(call: Any) -> str:
    """The name of the function that is called; empty where a call says none."""
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""


def _result(call: Message, tools: Mapping[str, Any]) -> tuple[str, Any]:
    """The tool's name and what it returned, or its error as TRL has the policy see it."""
    kind = call.get("type") if isinstance(call, Mapping) else None
    if kind not in (None, "function"):
        return str(call.get("name", "unknown")), {"error": f"Unsupported tool call type: {kind}"}
    name = _name_of(call)
    try:
        if not name:  # parsers pass on what the policy wrote, whole or not
            return "unknown", {"error": f"A tool call without a name: {shortened(call)}"}
        if name not in tools:
            raise ValueError(f"Tool {name} not found.")
        return name, tools[name](**call["function"]["arguments"])
    except Exception as error:
        return name, {"error": str(error)}


async def _all(calls: Sequence[Message], tools: Mapping[str, Any]) -> list[tuple[str, Any]]:
    async def result(call: Message) -> tuple[str, Any]:
        name, value = _result(call, tools)
        if not inspect.isawaitable(value):
            return name, value
        try:
            return name, await value
        except Exception as error:
            return name, {"error": str(error)}

    return list(await asyncio.gather(*map(result, calls)))


def _tool_message(name: str, result: Any) -> Message:
    content = result if isinstance(result, list) else str(result)
    return {"role": "tool", "name": name, "content": content}


def _joined(content: Any, observation: Any) -> Any:
    """A message's content with an observation after it; both texts, or as blocks."""
    if isinstance(content, str) and isinstance(observation, str):
        return content + observation
    blocks = [[{"type": "text", "text": part}] if isinstance(part, str) else part for part in (content, observation)]
    if not all(isinstance(part, list) for part in blocks):
        raise ContractError(
            f"expected reset to return a text, blocks of content or None, got {shortened(observation)}"
        )
    return blocks[0] + blocks[1]
