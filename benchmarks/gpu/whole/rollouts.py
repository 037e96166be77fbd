"""Rollouts that a trainer is played: groups of four that share a prompt and fork twice, the same in every run."""

from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

VOCAB, NUM_PROMPTS, NUM_GENERATIONS, STEPS = 48, 12, 4, 3


def tokenizer() -> PreTrainedTokenizerFast:
    """Words t0 .. t47, one id each."""
    inner = Tokenizer(WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t2"))
    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="t0", eos_token="t1", unk_token="t2")


def group_of(prompt: str) -> dict[str, list[Any]]:
    """A ragged group; the environment wrote a run of tokens in its shared part, one rollout ends with eos."""
    rng = np.random.default_rng([0, int(prompt[1:])])
    prompt_ids = rng.integers(3, VOCAB, rng.integers(2, 30)).tolist()
    shared = rng.integers(3, VOCAB, rng.integers(3, 80)).tolist()
    second = shared + rng.integers(3, VOCAB, rng.integers(1, 20)).tolist()
    bases = [shared[: len(shared) // 2], shared, second, second]
    completions = [base + rng.integers(3, VOCAB, rng.integers(1, 40)).tolist() for base in bases]
    completions[0][-1] = 1
    return {
        "prompt_ids": [prompt_ids] * NUM_GENERATIONS,
        "completion_ids": completions,
        "logprobs": [rng.normal(-2, 0.5, len(row)).tolist() for row in completions],
        "env_mask": [[int(not 2 <= t < 2 + len(shared) // 3) for t in range(len(row))] for row in completions],
        "recorded_reward": rng.normal(size=NUM_GENERATIONS).tolist(),
    }


def rollout_func(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
    """TRL's contract: prompts come repeated, as many rows go back, in order."""
    output: dict[str, list[Any]] = {}
    for prompt in prompts[::NUM_GENERATIONS]:
        for key, values in group_of(prompt).items():
            output.setdefault(key, []).extend(values)
    return output


def recorded_reward(completions: list[Any], recorded_reward: list[float], **extra: Any) -> list[float]:
    """The reward that came with the rollouts."""
    return recorded_reward


def dataset() -> Dataset:
    """Prompts p0 .. p11."""
    return Dataset.from_dict({"prompt": [f"p{i}" for i in range(NUM_PROMPTS)]})


def arguments(folder: Path, **overrides: Any) -> dict[str, Any]:
    """Of a trainer, for a few SGD steps."""
    return {
        "output_dir": str(folder), "max_steps": STEPS, "optim": "sgd", "learning_rate": 0.05, "max_grad_norm": 1e9,
        "lr_scheduler_type": "constant", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
        "num_generations": NUM_GENERATIONS, "max_completion_length": 256, "temperature": 0.9,
        "router_aux_loss_coef": 0.0, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "dataloader_pin_memory": False, **overrides,
    }  # fmt: skip
