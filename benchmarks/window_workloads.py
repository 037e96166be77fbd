"""What the benchmark of windows' memory runs: two small models, trees, and a planner's limits."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from harts_hf import PlannerConfig

VOCAB, SEED = 512, 0
_LAYERS = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "pad_token_id": 0,
    "eos_token_id": 1,
}
MODELS = {
    "qwen3_5_text": {
        **_LAYERS,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "bailing_hybrid": {
        **_LAYERS,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A tree, an execution and its limits."""

    tree: str
    execution: str
    budget: int
    max_graph_tokens: int | None = None
    max_handoff_bytes: int | None = None

    @property
    def planner(self) -> PlannerConfig:
        """The planner's configuration."""
        return PlannerConfig(
            max_tokens_per_microbatch=self.budget,
            sharing="always",
            execution=self.execution,
            max_graph_tokens=self.max_graph_tokens,
            max_handoff_bytes=self.max_handoff_bytes,
        )


def spine(rng: np.random.Generator, turns: int, longest: int, prompts: int = 1) -> list[np.ndarray]:
    """A fork at every turn of a history; ``prompts`` histories of equal lengths behind one system prompt of 100."""
    lengths = rng.integers(longest // 4, longest, (turns, 2))
    system, rows = rng.integers(2, VOCAB, 100), []
    for prompt in range(prompts):
        history = np.append(system, [2 + prompt])
        for turn, fork in lengths.tolist():
            history = np.append(history, rng.integers(2, VOCAB, turn))
            rows.append(np.append(history, rng.integers(2, VOCAB, fork)))
    return rows


def bush(rng: np.random.Generator, roots: int, count: int) -> list[np.ndarray]:
    """Trajectories that fork from one another at random depths."""
    rows = []
    for root in range(roots):
        grown = [np.append([2 + root], rng.integers(2, VOCAB, 150))]
        while len(grown) < count:
            base = grown[rng.integers(len(grown))]
            keep = int(rng.integers(60, len(base) + 1))
            grown.append(np.append(base[:keep], rng.integers(2, VOCAB, rng.integers(20, 150))))
        rows += grown
    return rows


def trees() -> dict[str, list[np.ndarray]]:
    """The trajectories, by name."""
    rng = np.random.default_rng(SEED)
    return {
        "spine": spine(rng, 20, 60),
        "bush": bush(rng, 3, 12),
        "spine of long turns": spine(rng, 10, 120),
        "wide bush": bush(rng, 2, 20),
        "1 history": spine(np.random.default_rng(SEED + 1), 8, 80),
        "8 histories": spine(np.random.default_rng(SEED + 1), 8, 80, prompts=8),
    }


def build_model(family: str) -> nn.Module:
    """A model of random weights whose gradients exist already."""
    torch.manual_seed(SEED)
    config = AutoConfig.for_model(family, **MODELS[family])
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model
