"""The collector: a TRL ``rollout_func`` that samples trees."""

import math
from typing import Any

import numpy as np
import torch
from transformers.integrations import is_deepspeed_zero3_enabled
from trl.models.utils import unwrap_model_for_generation

from harts_hf.rollouts.decoding import LockstepDecoder, TokenSampler
from harts_hf.rollouts.environment import EnvironmentFactory
from harts_hf.rollouts.sampler import SampledRollout, TreeSampler, TreeShape


class TreeRolloutCollector:
    """Samples rollout trees with the trainer's policy; give it to a trainer as ``rollout_func``.

    At chosen turns each conversation forks into several continuations, environment state and model cache forked with
    it, so that siblings share their history token by token and each shared token is sampled once. A conversation that
    is over before a fork stands for all continuations that the fork would have made: it is returned that many times.
    So each prompt yields exactly ``num_generations`` rows, and each history keeps its weight.

    Example::

        collector = TreeRolloutCollector(ShelfEnvironment, branching=(4, 2, 2), max_turns=6, max_turn_tokens=2)
        trainer = TreeGRPOTrainer(model, environment_reward, args, dataset, rollout_func=collector)  # 16 generations

    Every token of an observation is one forward pass of all live conversations, so environments that answer in
    thousands of tokens are slow here. vLLM is not used.

    Args:
        environment: makes a new environment (a class, or a function without arguments).
        branching: continuations at each fork; the product must be ``num_generations``.
        fork_turns: the turns before which the forks happen, 0 the first; by default the first ``len(branching)``.
        max_turns: most turns of a conversation.
        max_turn_tokens: most tokens of a turn. A turn ends there or at one of the trainer's EOS tokens.

    Attributes:
        last_rollouts: the rollouts of the latest call, for plots and logs; empty before the first.
        last_sampling_tokens: tokens that the policy has read for them, shared ones once.
    """

    def __init__(
        self,
        environment: EnvironmentFactory,
        *,
        branching: tuple[int, ...],
        fork_turns: tuple[int, ...] | None = None,
        max_turns: int,
        max_turn_tokens: int,
    ) -> None:
        self._environment = environment
        self._branching = tuple(branching)
        self._fork_turns = tuple(range(len(self._branching))) if fork_turns is None else tuple(fork_turns)
        self._max_turns = max_turns
        self._max_turn_tokens = max_turn_tokens
        self._calls: tuple[int, int] = (-1, 0)  # the trainer's step, and the calls during it
        self.last_rollouts: list[SampledRollout] = []
        self.last_sampling_tokens = 0
        # Raises now, not at the first step.
        self._shape(self._branching, self._fork_turns, 1)

    def check(self, args: Any) -> None:
        """Checks itself against a trainer's arguments; every call does it too.

        Raises:
            ValueError: branching does not give ``num_generations`` leaves.
        """
        leaves = math.prod(self._branching)
        if leaves != args.num_generations:
            factors = " x ".join(map(str, self._branching))
            raise ValueError(
                f"expected branching factors whose product is num_generations = {args.num_generations}, got "
                f"{factors} = {leaves}"
            )

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
            ValueError: branching does not give ``num_generations`` leaves; prompts that are not whole groups; vLLM;
                a model whose parameters are sharded while it samples.
        """
        _check_backend(trainer)
        args = trainer.args
        shape = self._shape_for(trainer)
        roots = _group_prompts(prompts, shape.num_leaves)
        seeds = self._seeds(trainer, len(roots) + 1)
        environments = [self._environment() for _ in roots]
        texts = [env.reset(prompt, seed=seed) for env, prompt, seed in zip(environments, roots, seeds, strict=False)]
        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        with (
            unwrap_model_for_generation(
                trainer.model_wrapped,
                trainer.accelerator,
                gather_deepspeed3_params=args.ds3_gather_for_generation,
                gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs,
            ) as model,
            torch.no_grad(),
        ):
            decoder = LockstepDecoder(model, pad_token_id=tokenizer.pad_token_id)
            sampler = TreeSampler(
                decoder=decoder,
                sampler=TokenSampler(args, seed=seeds[-1], device=model.device),
                tokenizer=tokenizer,
                end_token_ids=trainer.eos_token_ids,
                shape=shape,
                max_prompt_tokens=_num_positions(model),
            )
            self.last_rollouts = sampler.sample(environments, texts)
        self.last_sampling_tokens = decoder.num_forward_tokens
        return _rows(self.last_rollouts)

    def _shape_for(self, trainer: Any) -> TreeShape:
        max_tokens = trainer.args.max_completion_length
        if not trainer.model.training:  # evaluation: independent conversations, however many there are
            return self._shape((trainer.num_generations_eval,), (0,), max_tokens)
        self.check(trainer.args)
        return self._shape(self._branching, self._fork_turns, max_tokens)

    def _shape(self, branching: tuple[int, ...], fork_turns: tuple[int, ...], max_tokens: int) -> TreeShape:
        return TreeShape(
            branching=branching,
            fork_turns=fork_turns,
            max_turns=self._max_turns,
            max_turn_tokens=self._max_turn_tokens,
            max_completion_tokens=max_tokens,
        )

    def _seeds(self, trainer: Any, count: int) -> list[int]:
        """Seeds that depend on the trainer's seed, its step, the calls during it and the rank, and on nothing else."""
        step = trainer.state.global_step
        self._calls = (step, self._calls[1] + 1 if self._calls[0] == step else 0)
        entropy = (trainer.args.seed, step, self._calls[1], trainer.accelerator.process_index)
        return np.random.SeedSequence(entropy).generate_state(count, np.uint32).tolist()


def environment_reward(*, environment_reward: list[float], **_: Any) -> list[float]:
    """The reward function for the collector's rollouts: what the environment said."""
    return environment_reward


def _check_backend(trainer: Any) -> None:
    if trainer.use_vllm:
        raise ValueError("expected use_vllm=False: tree rollouts are sampled with the trainer's own model")
    sharded = trainer.is_fsdp_enabled or (is_deepspeed_zero3_enabled() and not trainer.args.ds3_gather_for_generation)
    if sharded:
        raise ValueError(
            "expected parameters that are whole while sampling (DDP, ZeRO up to 2, or ZeRO-3 with "
            "ds3_gather_for_generation), got sharded ones: processes that sample different numbers of tokens would "
            "wait for one another for ever"
        )


def _num_positions(model: Any) -> int | None:
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


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
