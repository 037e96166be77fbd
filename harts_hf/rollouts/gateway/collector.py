"""The collector of agents' episodes: a TRL ``rollout_func``."""

import dataclasses
import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from harts_hf.errors import AllFailedError
from harts_hf.rollouts.calls import Calls
from harts_hf.rollouts.engines import Engine
from harts_hf.rollouts.engines.opening import open_engine, wants_routes
from harts_hf.rollouts.episodes import ABSENT, ROUTED_EXPERTS, TRUNCATED
from harts_hf.rollouts.gateway.agents import Agent, AgentAccess, AgentFailure, checked_reward
from harts_hf.rollouts.gateway.commands import as_agent
from harts_hf.rollouts.gateway.episodes import (
    AgentEpisode,
    AgentSample,
    as_reward,
    episode_of,
    file_rows,
    group_prompts,
    metrics_of,
    request_seeds,
    task_seed,
)
from harts_hf.rollouts.gateway.runs import AgentJob, AgentRuns
from harts_hf.rollouts.gateway.server import Gateway
from harts_hf.rollouts.gateway.sessions import Session
from harts_hf.rollouts.gateway.sources import ChatFormatFactory, TurnSources
from harts_hf.rollouts.gateway.turns import TurnSource
from harts_hf.rollouts.salvage import place_of_failures, saved_on_failure

logger = logging.getLogger(__name__)


class AgentError(AllFailedError):
    """Every agent of a collection failed."""


class AgentRolloutCollector:
    """Trains an agent that talks to a URL; give it to a trainer as ``rollout_func``.

    The agent finds the policy behind an OpenAI-compatible endpoint of its own. Each of its requests becomes a sample
    of its episode, or continues one (see docs/agents.md).

    Example::

        def agent(task, *, base_url, api_key):
            client = openai.OpenAI(base_url=base_url, api_key=api_key)
            answer = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": task}])
            return float("42" in answer.choices[0].message.content)  # the reward

        collector = AgentRolloutCollector(agent, max_turns=8, timeout=120)
        trainer = TreeGRPOTrainer(model, agent_reward, args, dataset, rollout_func=collector)

    Args:
        agent: a function (also a coroutine function), a command as a list of texts, or an
            :class:`~harts_hf.rollouts.gateway.Agent`.
        reward: an episode's reward from the :class:`AgentEpisode`; by default what the agent returned, if that is a
            number. Not asked for agents that failed.
        failure_reward: the reward of agents that failed. By default they have none: their episodes are left out of the
            training, whatever they sampled.
        max_turns: turns of an episode; a request for more is refused (``max_turns_exceeded``).
        max_turn_tokens: most tokens of a turn; the trainer's ``max_completion_length`` by default.
        max_context_length: most tokens of a history and its turn; by default the engine's.
        timeout: seconds that an agent may take.
        max_concurrent: agents that run at a time.
        chat_format: makes the policy's chat format from its tokenizer; by default the agent's own, else the server's
            with vLLM, else :class:`~harts_hf.rollouts.gateway.TrlFormat`. "vllm_chat" has a vLLM server without
            ``--enable-scale-out`` do everything, which tokenises histories anew.

    Attributes:
        agent: what plays.
        last_episodes: the episodes of the latest call; empty before the first.
        last_rollouts: their samples.
        last_metrics: counts of the latest call, as they are logged (``agent/...``).
        last_sampling_tokens: tokens that the policy has read for them.

    Raises:
        ValueError: an agent that is none, numbers out of range.
    """

    uses_engine = True  # turns are sampled one by one, by the engine that the trainer's arguments name

    def __init__(
        self,
        agent: Any,
        *,
        reward: Callable[[AgentEpisode], float | None] | None = None,
        failure_reward: float | None = None,
        max_turns: int = 32,
        max_turn_tokens: int | None = None,
        max_context_length: int | None = None,
        timeout: float = 600.0,
        max_concurrent: int = 64,
        chat_format: ChatFormatFactory | str | None = None,
    ) -> None:
        limits = {"max_turns": max_turns, "max_concurrent": max_concurrent}
        limits |= {"max_turn_tokens": max_turn_tokens or 1, "max_context_length": max_context_length or 2}
        for name, value in limits.items():
            if value < 1:
                raise ValueError(f"expected {name} of at least 1, got {value}")
        if not timeout > 0:
            raise ValueError(f"expected a timeout above 0, got {timeout}")
        self.agent: Agent = as_agent(agent)
        self._sources = TurnSources(
            self.agent, chat_format, max_turn_tokens=max_turn_tokens, max_context_length=max_context_length
        )
        self._reward = reward
        self._failure_reward = failure_reward
        self._max_turns = max_turns
        self._timeout = timeout
        self._max_concurrent = max_concurrent
        self._gateway: Gateway | None = None
        self._gateway_lock = threading.Lock()
        self._calls = Calls()
        self._num_failed_calls = 0  # in a row
        self._has_said_without_reward = False
        self.last_episodes: list[AgentEpisode] = []
        self.last_rollouts: list[AgentSample] = []
        self.last_metrics: dict[str, float] = {}
        self.last_sampling_tokens = 0

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Has the agent play one episode for each prompt.

        Args:
            prompts: this process's prompts, each repeated ``num_generations`` times in a row, as TRL passes them; a
                group may be split over processes. All processes are assumed to get the same number.
            trainer: the ``GRPOTrainer``; policy, tokenizer, sampling settings, limits and seed are its own.

        Returns:
            For each sample ``prompt_ids``, ``completion_ids``, ``logprobs``, ``env_mask``, ``episode`` (the index of
            its prompt) and, where the trainer replays the engine's routes, ``routed_experts``; for each prompt
            ``agent_reward`` (float or None), ``truncated`` (whether a limit ended the episode: turns, length or
            time), ``num_turns`` and ``tree`` (ints). An episode that is left out has no sample. ``exact_env_mask`` is
            True: the masks are of draws, so samples of an episode need not be compared for tokens that recur.

        Raises:
            AgentError: every agent failed (with ``failure_reward``: before it sampled anything); where there are
                several processes, every one of this process and in two calls in a row.
            EngineError: the engine did.
            ValueError: prompts of a group that differ, a trainer whose settings contradict one another, a tokenizer
                without a known chat format.

        Whatever is raised once the agents run, what was sampled by then is written to ``salvaged`` in the trainer's
        output folder, as a rollout file that the exception names.
        """
        rank, size = trainer.accelerator.process_index, _group_size(trainer)
        groups = group_prompts(prompts, size, first=rank * len(prompts))
        trees = [group - groups[0] for group in groups]
        shared = self._seeds(trainer)
        own = (*shared, rank)
        with open_engine(trainer) as engine:
            read_before = engine.num_read_tokens
            sessions = self._open_sessions(len(prompts), self._sources.source(trainer, engine), own)
            task_seeds = [task_seed(shared, group) for group in groups]
            with saved_on_failure(lambda: file_rows(sessions, trees), *place_of_failures(trainer)):
                self.last_episodes = self._play(prompts, trees, sessions, engine, task_seeds)
                self.last_sampling_tokens = engine.num_read_tokens - read_before
                return self._rows(self.last_episodes, trainer)

    def close(self) -> None:
        """Stops the endpoint; another call starts it again."""
        with self._gateway_lock:
            if self._gateway is not None:
                self._gateway.close()
                self._gateway = None

    def check(self, args: Any) -> None:
        """Nothing of a trainer's arguments contradicts agents: episodes may have any number of samples."""

    def check_tokenizer(self, tokenizer: Any, *, use_vllm: bool) -> None:
        """Checks before anything is sampled that answers can be parsed.

        Args:
            tokenizer: of the policy.
            use_vllm: whether a server samples, which is not asked.

        Raises:
            ValueError: a tokenizer without a known chat format.
        """
        self._sources.check_tokenizer(tokenizer, use_vllm=use_vllm)

    def _open_sessions(self, number: int, source: TurnSource, seeds: tuple[int, ...]) -> list[Session]:
        gateway = self._open_gateway()
        return [
            gateway.open(source, seed_of=request_seeds((*seeds, episode)), max_turns=self._max_turns)
            for episode in range(number)
        ]

    def _play(
        self, prompts: list[Any], trees: list[int], sessions: list[Session], engine: Engine, task_seeds: list[int]
    ) -> list[AgentEpisode]:
        gateway = self._open_gateway()
        gateway.watch(engine.wake)
        jobs = [
            AgentJob(
                task=prompt,
                session=session,
                access=AgentAccess(
                    base_url=session.base_url,
                    api_key=session.key,
                    model=session.source.model,
                    seed=task_seed,
                ),
            )
            for prompt, task_seed, session in zip(prompts, task_seeds, sessions, strict=True)
        ]
        runs = AgentRuns(
            self.agent,
            jobs,
            timeout=self._timeout,
            max_concurrent=self._max_concurrent,
            on_done=engine.wake,
        )
        try:
            with runs:
                engine.run(until=lambda: gateway.error is not None or runs.is_done())
        finally:
            for session in sessions:
                gateway.drop(session)
        if gateway.error is not None:
            raise gateway.error
        played = []
        for job, tree, outcome in zip(jobs, trees, runs.outcomes, strict=True):
            assert outcome is not None
            played.append(self._scored(episode_of(job, tree, outcome)))
        # An agent's failures are logged when they happen.
        wrong = [
            episode.failure
            for episode, outcome in zip(played, runs.outcomes, strict=True)
            if episode.failure is not None and outcome is not None and outcome.failure is None
        ]
        if wrong:
            logger.warning("%d episodes have no reward: %s", len(wrong), wrong[0])
        without = float(self._without_reward(played))
        self.last_metrics = {**metrics_of(sessions, played), "agent/without_reward": without}
        return played

    def _without_reward(self, episodes: list[AgentEpisode]) -> int:
        """Agents that ended well, but say no reward where nobody else says one."""
        if self._reward is not None:
            return 0
        without = [episode for episode in episodes if episode.failure is None and episode.reward is None]
        if without and not self._has_said_without_reward:
            self._has_said_without_reward = True
            logger.warning(
                "expected agents to return a number as reward, got %s from %d of %d: their episodes have none, unless "
                "another reward function gives one (agent/without_reward counts them)",
                type(without[0].result).__name__,
                len(without),
                len(episodes),
            )
        return len(without)

    def _scored(self, episode: AgentEpisode) -> AgentEpisode:
        failure = episode.failure
        reward = self._failure_reward
        if failure is None:
            try:
                reward = checked_reward(self._reward(episode) if self._reward else as_reward(episode.result))
            except AgentFailure as error:
                failure = error
        return dataclasses.replace(episode, failure=failure, reward=reward)

    def _rows(self, episodes: list[AgentEpisode], trainer: Any) -> dict[str, Any]:
        self._check_failures(episodes, trainer)
        # Without a reward nothing can be learned from what a failed agent sampled: it counts nowhere.
        trained = [
            (index, row)
            for index, episode in enumerate(episodes)
            if episode.failure is None or episode.reward is not None
            for row in episode.rows
        ]
        self.last_rollouts = [
            AgentSample(
                tree=episodes[index].tree,
                prompt_ids=row.prompt_ids,
                completion_ids=row.completion_ids,
                reward=episodes[index].reward,
            )
            for index, row in trained
        ]
        logged = getattr(trainer, "_metrics", None)
        if logged is not None:
            mode = "train" if trainer.model.training else "eval"
            for name, value in self.last_metrics.items():
                logged[mode][name].append(value)
        return {
            **{
                key: [getattr(row, key) for _, row in trained]
                for key in ("prompt_ids", "completion_ids", "logprobs", "env_mask")
            },
            **({ROUTED_EXPERTS: [row.routed_experts for _, row in trained]} if wants_routes(trainer.args) else {}),
            "exact_env_mask": True,
            "episode": [index for index, _ in trained],
            ABSENT: [episode.failure is not None and episode.reward is None for episode in episodes],
            "agent_reward": [episode.reward for episode in episodes],
            TRUNCATED: [episode.truncated for episode in episodes],
            "num_turns": [episode.num_turns for episode in episodes],
            "tree": [episode.tree for episode in episodes],
        }

    def _check_failures(self, episodes: list[AgentEpisode], trainer: Any) -> None:
        # A failure that has a reward and samples is trained: the policy may learn to avoid it.
        failures = [
            episode.failure
            for episode in episodes
            if episode.failure is not None and (episode.reward is None or not episode.rows)
        ]
        self._num_failed_calls = self._num_failed_calls + 1 if len(failures) == len(episodes) else 0
        # Of several processes one may have few episodes, and bad luck with all of them.
        if self._num_failed_calls < (1 if trainer.accelerator.num_processes == 1 else 2):
            return
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(f.kind for f in failures).items())
        raise AgentError(
            f"expected an agent that comes to its end, got {len(failures)} failures ({kinds}): see the log above"
        )

    def _open_gateway(self) -> Gateway:
        with self._gateway_lock:
            if self._gateway is None:
                self._gateway = Gateway()
            return self._gateway

    def _seeds(self, trainer: Any) -> tuple[int, ...]:
        """What all seeds of a call depend on, on every process: the trainer's seed, and the call."""
        step, is_training, call = self._calls.next(trainer)
        return (trainer.args.seed, step, int(is_training), call)


def agent_reward(*, agent_reward: list[float | None], **_: Any) -> list[float | None]:
    """The reward function for agents' episodes: what the agent, or the collector's ``reward``, said."""
    return agent_reward


agent_reward.reads_texts = False  # type: ignore[attr-defined]


def _group_size(trainer: Any) -> int:
    size = trainer.args.num_generations if trainer.model.training else trainer.num_generations_eval
    return int(size)
