"""The collector: a TRL ``rollout_func`` that samples trees."""

from typing import Any

import numpy as np

from harts_hf.rollouts.calls import Calls
from harts_hf.rollouts.engines.opening import open_engine
from harts_hf.rollouts.environment import EnvironmentFactory
from harts_hf.rollouts.forks import ForkPolicy, NoForks, TurnForks, check_policy
from harts_hf.rollouts.salvage import place_of_failures, rollout_row, saved_on_failure
from harts_hf.rollouts.sampled import SampledRollout
from harts_hf.rollouts.sampler import TreeSampler, TurnLimits


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

    Attributes:
        last_rollouts: the rollouts of the latest call, for plots and logs; empty before the first.
        last_sampling_tokens: tokens that the policy has read or sampled for them, those of kept states once.

    Raises:
        ValueError: neither or both of ``branching`` and ``fork_policy``; limits below 1; a policy that does not work
            with them.
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
    ) -> None:
        self._environment = environment
        self._policy = _fork_policy(branching, fork_turns, fork_policy)
        self._max_turns = max_turns
        self._max_turn_tokens = max_turn_tokens
        self._calls = Calls()
        self.last_rollouts: list[SampledRollout] = []
        self.last_sampling_tokens = 0
        # Raises now, not at the first step.
        self._limits(1)
        self._policy.check(max_turns=max_turns)

    def check(self, args: Any) -> None:
        """Checks itself against a trainer's arguments; every call does it too.

        Raises:
            ValueError: the fork policy cannot make ``num_generations`` episodes.
        """
        self._policy.check(max_turns=self._max_turns, num_episodes=args.num_generations)

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Samples one tree per prompt group.

        Args:
            prompts: this process's prompts, each repeated ``num_generations`` times in a row, as TRL passes them.
            trainer: the ``GRPOTrainer``; policy, tokenizer, sampling settings, limits and seed are its own.

        Returns:
            ``len(prompts)`` rows in the order of the prompts: ``prompt_ids``, ``completion_ids``, ``logprobs``,
            ``env_mask`` (lists of lists, see :class:`SampledRollout`), and for reward functions ``environment_reward``
            (floats), ``tree`` and ``num_turns`` (ints).

        Raises:
            ValueError: prompts that are not whole groups; settings that the policy, the environment or the engine
                cannot work with.
            EngineError: the engine could not sample.

        Whatever is raised, the conversations that were over by then are written to ``salvaged`` in the trainer's
        output folder, as a rollout file that the exception names.
        """
        policy, num_episodes = self._episodes(trainer)
        roots = _group_prompts(prompts, num_episodes)
        limits = self._limits(trainer.args.max_completion_length)
        *seeds, sampling_seed = self._seeds(trainer, len(roots) + 1)
        with open_engine(trainer, seed=sampling_seed) as engine:
            read_before = engine.num_read_tokens
            environments = [self._environment() for _ in roots]
            begins = zip(environments, roots, seeds, strict=True)
            texts = [environment.reset(prompt, seed=seed) for environment, prompt, seed in begins]
            sampler = TreeSampler(
                engine=engine,
                tokenizer=getattr(trainer.processing_class, "tokenizer", trainer.processing_class),
                policy=policy,
                limits=limits,
                num_episodes=num_episodes,
                seed=sampling_seed,
            )
            with saved_on_failure(lambda: _file_rows(sampler.rollouts()), *place_of_failures(trainer)):
                self.last_rollouts = sampler.sample(environments, texts)
            self.last_sampling_tokens = engine.num_read_tokens - read_before
        return _rows(self.last_rollouts)

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


def environment_reward(*, environment_reward: list[float], **_: Any) -> list[float]:
    """The reward function for the collector's rollouts: what the environment said."""
    return environment_reward


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


def _group_prompts(prompts: list[Any], group_size: int) -> list[Any]:
    if not prompts or len(prompts) % group_size:
        raise ValueError(f"expected whole groups of {group_size} prompts on each process, got {len(prompts)} prompts")
    roots = prompts[::group_size]
    for index, prompt in enumerate(prompts):
        if prompt != roots[index // group_size]:
            first = index - index % group_size
            raise ValueError(
                f"expected prompt {index} to repeat prompt {first} (groups of {group_size}); is a group split over "
                "processes?"
            )
    return roots


def _rows(rollouts: list[SampledRollout]) -> dict[str, Any]:
    return {
        "prompt_ids": [rollout.prompt_ids for rollout in rollouts],
        "completion_ids": [rollout.completion_ids for rollout in rollouts],
        "logprobs": [rollout.logprobs for rollout in rollouts],
        "env_mask": [rollout.env_mask for rollout in rollouts],
        "environment_reward": [rollout.reward for rollout in rollouts],
        "tree": [rollout.tree for rollout in rollouts],
        "num_turns": [rollout.num_turns for rollout in rollouts],
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
    ]
