"""The collector: a TRL ``rollout_func`` that samples trees."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from harts_hf.rollouts.calls import Calls
from harts_hf.rollouts.contract import finite
from harts_hf.rollouts.engines.opening import open_engine, wants_routes
from harts_hf.rollouts.environment import Environment, EnvironmentFactory
from harts_hf.rollouts.environments.chat import ChatWriter
from harts_hf.rollouts.environments.report import FailureReport
from harts_hf.rollouts.environments.texts import LongObservations, ObservationLimit
from harts_hf.rollouts.environments.workers import Workers
from harts_hf.rollouts.environments.writers import AnyWriter
from harts_hf.rollouts.episodes import ABSENT, ROUTED_EXPERTS
from harts_hf.rollouts.forks import ForkPolicy, NoForks, TurnForks, check_policy
from harts_hf.rollouts.salvage import place_of_failures, rollout_row, saved_on_failure
from harts_hf.rollouts.sampled import SampledRollout
from harts_hf.rollouts.sampler import TreeSampler
from harts_hf.rollouts.turn_limits import TurnLimits


class TreeRolloutCollector:
    """Samples rollout trees with the trainer's policy; give it to a trainer as ``rollout_func``.

    Conversations fork where a fork policy says, environment state and the engine's state forked with them, so that
    siblings share their history token by token and each shared token is sampled once. Each prompt yields exactly
    ``num_generations`` rows, whatever ends early (``harts_hf.rollouts.forks`` says how). Turns are sampled by the
    engine that the trainer's arguments name: its own model, or a vLLM server.

    Example::

        collector = TreeRolloutCollector(ShelfEnvironment, branching=(4, 2, 2), max_turns=6, max_turn_tokens=2)
        trainer = TreeGRPOTrainer(model, environment_reward, args, dataset, rollout_func=collector)  # 16 generations

    Args:
        environment: makes a new environment (a class, or a function without arguments).
        branching: continuations at each fork; with ``fork_turns`` short for ``fork_policy=TurnForks(...)``.
        fork_turns: the turns before which the forks happen, 0 the first; by default the first ``len(branching)``.
        fork_policy: where conversations fork, instead of ``branching``.
        max_turns: most turns of a conversation.
        max_turn_tokens: most tokens of a turn. A turn ends there or at one of the trainer's EOS tokens.
        chat: whether the tokenizer's chat template writes the conversation, each text of the environment being a
            user's message. Without it texts are shown as they are, marks and all. Environments whose turns are
            messages (:class:`~harts_hf.rollouts.ChatEnvironment`) are written by the template anyway.
        environment_timeout: seconds that a call of an environment may take. Calls then happen in another thread, and
            one that hangs is left to itself. None: no limit, and calls happen in the trainer's thread.
        environment_workers: calls at a time. More than one helps where environments wait (for a server, a tool); they
            are then called by several threads, each by one at a time.
        failed_reward: the reward of episodes whose environment failed. By default they have none: they are left out of
            the training and of their group's statistics, whatever was sampled.
        max_observation_characters: of an observation, before it is tokenised; by default only the room that a
            conversation has left counts, and one without room for its next observation is over.
        long_observations: what becomes of longer ones: ``"cut"`` (the default) keeps the beginning and the end, and a
            line between them says what is missing; ``"fail"`` makes them failures.

    Attributes:
        last_rollouts: the rollouts of the latest call that sampled something, for plots and logs.
        last_sampling_tokens: tokens that the policy has read or sampled for them, those of kept states once.
        last_metrics: what was logged of the latest call.

    Raises:
        ValueError: neither or both of ``branching`` and ``fork_policy``; limits below 1; a policy that does not work
            with them; options out of range.
    """

    uses_engine = True  # turns are sampled one by one, by the engine that the trainer's arguments name

    def __init__(
        self,
        environment: EnvironmentFactory,
        *,
        branching: tuple[int, ...] | None = None,
        fork_turns: tuple[int, ...] | None = None,
        fork_policy: ForkPolicy | None = None,
        max_turns: int,
        max_turn_tokens: int,
        chat: bool = False,
        environment_timeout: float | None = None,
        environment_workers: int = 1,
        failed_reward: float | None = None,
        max_observation_characters: int | None = None,
        long_observations: LongObservations = "cut",
    ) -> None:
        self._environment = environment
        self._policy = _fork_policy(branching, fork_turns, fork_policy)
        self._max_turns = max_turns
        self._max_turn_tokens = max_turn_tokens
        self._chat = chat
        self._timeout, self._num_workers = environment_timeout, environment_workers
        self._failed_reward = None if failed_reward is None else finite(failed_reward, "failed_reward")
        self._observations = ObservationLimit(max_characters=max_observation_characters, long=long_observations)
        self._known_writer: tuple[Any, AnyWriter] | None = None  # of the tokenizer
        self._calls = Calls()
        self._report = FailureReport()
        self.last_rollouts: list[SampledRollout] = []
        self.last_sampling_tokens = 0
        self.last_metrics: dict[str, float] = {}
        # Raise now, not at the first step.
        self._workers(lambda: None)
        self._limits(1)
        self._policy.check(max_turns=max_turns)

    def check(self, args: Any) -> None:
        """Checks itself against a trainer's arguments; every call does it too.

        Raises:
            ValueError: the fork policy cannot make ``num_generations`` episodes.
        """
        self._policy.check(max_turns=self._max_turns, num_episodes=args.num_generations)

    def check_tokenizer(self, tokenizer: Any, *, use_vllm: bool) -> None:
        """Checks before anything is sampled that messages have a chat template, and tools one that writes them.

        An environment is made for it, and closed.

        Args:
            tokenizer: of the policy.
            use_vllm: whether a server samples; it makes no difference.

        Raises:
            ValueError: ``chat`` or environments whose turns are messages, and a tokenizer without a chat template;
                tools, and a template that does not write them or whose calls TRL cannot parse.
        """
        environment = self._environment()
        try:
            if self._chat or environment.takes_messages:
                writer = ChatWriter(tokenizer, end_ids=())
                if environment.offers_tools:
                    writer.check_tools()
        finally:
            environment.close()

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Samples one tree per prompt group.

        Args:
            prompts: this process's prompts, each repeated ``num_generations`` times in a row, as TRL passes them.
            trainer: the ``GRPOTrainer``; policy, tokenizer, sampling settings, limits and seed are its own.

        Returns:
            ``len(prompts)`` rows in the order of the prompts: ``prompt_ids``, ``completion_ids``, ``logprobs``,
            ``env_mask`` (lists of lists, see :class:`SampledRollout`), where the trainer replays the engine's routes
            ``routed_experts`` (likewise), and for reward functions ``environment_reward``
            (floats or None), ``environment_failed`` and ``truncated`` (bools; a limit ended it), ``tree`` and
            ``num_turns`` (ints); of TRL's environments also ``environments``, as they stood at the end (None where
            they failed). An episode without a reward because its environment failed has no token in its mask.

        Raises:
            ValueError: prompts that are not whole groups; settings that the policy, the tokenizer or the engine
                cannot work with.
            EpisodesFailedError: the environment of every episode failed; see :class:`FailureReport`.
            EngineError: the engine could not sample.

        Whatever is raised, the conversations that were over by then are written to ``salvaged`` in the trainer's
        output folder, as a rollout file that the exception names.
        """
        policy, num_episodes = self._episodes(trainer)
        rows = _group_rows(prompts, num_episodes, getattr(trainer, "rollout_inputs", ()))
        limits = self._limits(trainer.args.max_completion_length)
        *seeds, sampling_seed = self._seeds(trainer, len(rows) + 1)
        writer = self._writer(trainer)
        num_cut = writer.num_cut
        with open_engine(trainer) as engine, self._workers(engine.wake) as workers:
            read_before = engine.num_read_tokens
            sampler = TreeSampler(
                engine=engine,
                writer=writer,
                workers=workers,
                policy=policy,
                limits=limits,
                num_episodes=num_episodes,
                seed=sampling_seed,
                failed_reward=self._failed_reward,
                routes=wants_routes(trainer.args),
            )
            begin = [partial(self._begin, row, seed) for row, seed in zip(rows, seeds, strict=True)]
            with saved_on_failure(lambda: _file_rows(sampler.rollouts()), *place_of_failures(trainer)):
                try:
                    rollouts = sampler.sample(begin)
                finally:
                    sampler.close()
            self.last_rollouts = [rollout for rollout in rollouts if rollout.completion_ids]
            self.last_sampling_tokens = engine.num_read_tokens - read_before
        counts = {"cut_observations": writer.num_cut - num_cut, "out_of_room": sampler.num_out_of_room}
        self.last_metrics = self._report.of(rollouts, trainer, counts=counts)
        found = _rows(rollouts, stand_in=trainer.eos_token_ids[0])
        if wants_routes(trainer.args):
            found[ROUTED_EXPERTS] = [rollout.routed_experts for rollout in rollouts]
        return found

    def _begin(self, row: Mapping[str, Any], seed: int) -> tuple[Environment, Any]:
        environment = self._environment()
        return environment, environment.begin(row, seed=seed)

    def _workers(self, on_done: Any) -> Workers:
        return Workers(timeout=self._timeout, count=self._num_workers, on_done=on_done)

    def _writer(self, trainer: Any) -> AnyWriter:
        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        # The template is checked once.
        if self._known_writer is None or self._known_writer[0] is not tokenizer:
            self._known_writer = (
                tokenizer,
                AnyWriter(
                    tokenizer,
                    chat=self._chat,
                    end_ids=trainer.eos_token_ids,
                    template_kwargs=trainer.args.chat_template_kwargs,
                    limit=self._observations,
                ),
            )
        return self._known_writer[1]

    def _episodes(self, trainer: Any) -> tuple[ForkPolicy, int]:
        if not trainer.model.training:  # evaluation: independent conversations, however many there are
            return NoForks(), trainer.num_generations_eval
        self.check(trainer.args)
        return self._policy, trainer.args.num_generations

    def _limits(self, max_tokens: int) -> TurnLimits:
        return TurnLimits(
            max_turns=self._max_turns,
            max_turn_tokens=self._max_turn_tokens,
            max_completion_tokens=max_tokens,
        )

    def _seeds(self, trainer: Any, count: int) -> list[int]:
        """Seeds that depend on the trainer's seed, the call, the rank, and on nothing else."""
        step, is_training, call = self._calls.next(trainer)
        entropy = (trainer.args.seed, step, call, trainer.accelerator.process_index, *([] if is_training else [1]))
        return np.random.SeedSequence(entropy).generate_state(count, np.uint32).tolist()


def environment_reward(*, environment_reward: list[float | None], **_: Any) -> list[float | None]:
    """The reward function for the collector's rollouts: what the environment said; None where it failed."""
    return environment_reward


environment_reward.reads_texts = False  # type: ignore[attr-defined]


def _fork_policy(
    branching: tuple[int, ...] | None, fork_turns: tuple[int, ...] | None, policy: ForkPolicy | None
) -> ForkPolicy:
    if policy is None and branching is not None:
        turns = range(len(branching)) if fork_turns is None else fork_turns
        return TurnForks(branching=tuple(branching), fork_turns=tuple(turns))
    if policy is None or branching is not None or fork_turns is not None:
        raise ValueError(
            "expected either branching (and fork_turns) or fork_policy, got "
            f"branching={branching}, fork_turns={fork_turns} and fork_policy={policy}"
        )
    check_policy(policy)
    return policy


def _group_rows(prompts: list[Any], group_size: int, inputs: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The first dataset row of each group; of a trainer that does not say more than prompts, the prompt alone."""
    if not prompts or len(prompts) % group_size:
        raise ValueError(f"expected whole groups of {group_size} prompts on each process, got {len(prompts)} prompts")
    for index, prompt in enumerate(prompts):
        first = index - index % group_size
        if prompt != prompts[first]:
            raise ValueError(
                f"expected prompt {index} to repeat prompt {first} (groups of {group_size}); is a group split over "
                "processes?"
            )
    firsts = range(0, len(prompts), group_size)
    # Somebody may call the collector with other prompts than the trainer's.
    is_known = len(inputs) == len(prompts) and all(inputs[at].get("prompt") == prompts[at] for at in firsts)
    return [{**(inputs[at] if is_known else {}), "prompt": prompts[at]} for at in firsts]


def _rows(rollouts: list[SampledRollout], *, stand_in: int) -> dict[str, Any]:
    """``stand_in``: the token of a row whose environment failed before it said anything."""
    left_out = [rollout.failure is not None and rollout.reward is None for rollout in rollouts]
    ends = [None if rollout.environment is None else rollout.environment.for_rewards() for rollout in rollouts]
    return {
        "prompt_ids": [rollout.prompt_ids or [stand_in] for rollout in rollouts],
        "completion_ids": [rollout.completion_ids or [stand_in] for rollout in rollouts],
        "logprobs": [rollout.logprobs or [0.0] for rollout in rollouts],
        "env_mask": [
            [0] * (len(rollout.env_mask) or 1) if is_left_out else rollout.env_mask
            for rollout, is_left_out in zip(rollouts, left_out, strict=True)
        ],
        ABSENT: left_out,
        "environment_reward": [rollout.reward for rollout in rollouts],
        "environment_failed": [rollout.failure is not None for rollout in rollouts],
        "truncated": [rollout.cut for rollout in rollouts],
        "tree": [rollout.tree for rollout in rollouts],
        "num_turns": [rollout.num_turns for rollout in rollouts],
        **({"environments": ends} if any(end is not None for end in ends) else {}),
    }


def _file_rows(rollouts: list[SampledRollout]) -> list[dict[str, Any]]:
    return [
        rollout_row(
            rollout.tree,
            rollout.prompt_ids,
            rollout.completion_ids,
            env_mask=rollout.env_mask,
            logprobs=rollout.logprobs,
            reward=rollout.reward,
        )
        for rollout in rollouts
        if rollout.completion_ids
    ]
