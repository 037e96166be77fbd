"""Recorded rollouts played back to stock and tree trainers alike."""

import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from support.models import VOCAB

NUM_PROMPTS = 12
NUM_GENERATIONS = 4


def tokenizer() -> PreTrainedTokenizerFast:
    """Words t0 .. t47, one id each."""
    inner = Tokenizer(WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t2"))
    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="t0", eos_token="t1", unk_token="t2")


def rollouts_of(prompt: str, seed: int = 0) -> dict[str, list[Any]]:
    """A ragged group of NUM_GENERATIONS rollouts that share a prompt and fork twice; deterministic."""
    rng = np.random.default_rng([seed, int(prompt[1:])])
    prompt_ids = rng.integers(3, VOCAB, rng.integers(2, 30)).tolist()
    shared = rng.integers(3, VOCAB, rng.integers(3, 80)).tolist()
    second = shared + rng.integers(3, VOCAB, rng.integers(1, 20)).tolist()
    bases = [shared[: len(shared) // 2], shared, second, second]
    completions = [base + rng.integers(3, VOCAB, rng.integers(1, 40)).tolist() for base in bases]
    completions[0][-1] = 1  # one row ends with eos; the others count as truncated
    # The environment wrote a run of tokens in the shared part.
    masks = [[int(not 2 <= t < 2 + len(shared) // 3) for t in range(len(row))] for row in completions]
    return {
        "prompt_ids": [prompt_ids] * NUM_GENERATIONS,
        "completion_ids": completions,
        "logprobs": [rng.normal(-2, 0.5, len(row)).tolist() for row in completions],
        "env_mask": masks,
        "recorded_reward": rng.normal(size=NUM_GENERATIONS).tolist(),
    }


def rollout_func(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
    """TRL's contract: prompts come repeated, as many rows go back, in order."""
    output: dict[str, list[Any]] = {}
    group = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
    for prompt in prompts[::group]:
        for key, values in rollouts_of(prompt).items():
            output.setdefault(key, []).extend(values[:group])
    return output


def rollout_func_without_mask(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
    """The same rollouts, every completion token the policy's own."""
    output = rollout_func(prompts, trainer)
    del output["env_mask"]
    return output


def rollout_func_with_advantages(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
    """The same rollouts with an advantage of its own for every token."""
    output = rollout_func(prompts, trainer)
    rng = np.random.default_rng([len(prompts), *output["completion_ids"][0][:3]])
    output["advantages"] = [rng.normal(size=len(row)).tolist() for row in output["completion_ids"]]
    return output


def rollout_func_with_ends(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
    """Groups in which a rollout ends inside another, and a third equals that other."""
    output = rollout_func(prompts, trainer)
    for start in range(0, len(prompts), NUM_GENERATIONS):
        for key in ("completion_ids", "logprobs", "env_mask"):
            rows = output[key]
            rows[start + 1] = list(rows[start + 3])
            rows[start + 2] = rows[start + 3][: 2 * len(rows[start + 3]) // 3]
    return output


def recorded_reward(completions: list[Any], completion_ids: list[list[int]], **extra: Any) -> list[float]:
    """The reward that was recorded, or one made from the tokens where a trainer keeps no extra columns."""
    return extra.get("recorded_reward") or [sum(row) % 17 / 8 for row in completion_ids]


@functools.cache
def dataset() -> Dataset:
    """Prompts p0 .. p11."""
    return Dataset.from_dict({"prompt": [f"p{i}" for i in range(NUM_PROMPTS)]})


def arguments(folder: Path, **overrides: Any) -> dict[str, Any]:
    """Arguments for three SGD steps on the CPU.

    One process computes no layer twice, which takes a third of a training; tests of activation checkpointing ask for
    it. Several keep TRL's default: their wrappers hook into what is computed again.
    """
    alone = {} if "WORLD_SIZE" in os.environ else {"gradient_checkpointing": False}
    return {
        **alone,
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": NUM_GENERATIONS,
        "max_completion_length": 256,
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "temperature": 0.9,
        "max_grad_norm": 1e9,
        "dataloader_pin_memory": False,
        **overrides,
    }
