"""Models and windows for ``whole.py``: real widths and head dims, few layers, few experts, a small vocabulary."""

import gzip
import json
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from harts_hf.tree import RolloutTree

VOCAB = 32768
_COMMON = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 1,
}
_MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
_SIGMOID_MOE = {"num_local_experts": 16, "num_experts_per_tok": 4}
_QWEN = {
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "hidden_size": 2048,
}
_SOFTMAX_MOE = {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "router_aux_loss_coef": 0.0,
}
# In the order in which they are run, should time be short.
CONFIGS = {
    "bailing_hybrid": {
        **_COMMON, **_MLA, **_SIGMOID_MOE,
        "hidden_size": 1536, "intermediate_size": 4096, "moe_intermediate_size": 512, "head_dim": 128,
        "num_attention_heads": 16, "num_key_value_heads": 16, "n_group": 8, "topk_group": 4,
        "first_k_dense_replace": 1,
    },
    "qwen3_5_text": {**_COMMON, **_QWEN, "intermediate_size": 6144},
    "kimi_linear": {
        **_COMMON, **_MLA, **_SIGMOID_MOE,
        "hidden_size": 2304, "intermediate_size": 9216, "moe_intermediate_size": 1024,
        "num_attention_heads": 32, "num_key_value_heads": 32, "linear_num_heads": 32, "linear_head_dim": 128,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "qwen3_5_moe_text": {**_COMMON, **_QWEN, **_SOFTMAX_MOE},
    "qwen3_next": {**_COMMON, **_QWEN, **_SOFTMAX_MOE, "intermediate_size": 5632},
    "olmo_hybrid": {
        **_COMMON,
        "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 16,
        "linear_num_key_heads": 16, "linear_num_value_heads": 16,
        "linear_key_head_dim": 96, "linear_value_head_dim": 192, "linear_allow_neg_eigval": True,
    },
}  # fmt: skip


def build_model(family: str, dry: bool, seed: int = 0) -> nn.Module:
    """In bf16 on the GPU; the tests' tiny model in float32 on the CPU if ``dry``."""
    torch.manual_seed(seed)
    if dry:
        from support.models import tiny_model

        return tiny_model(family)
    config = AutoConfig.for_model(family, **CONFIGS[family])
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.train()


def draw_tokens(tree: RolloutTree, vocab: int, seed: int = 0) -> list[np.ndarray]:
    """Random trajectories of a tree's shape; siblings begin with different tokens."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(2, vocab, tree.num_tokens)
    order = np.argsort(tree.parent, kind="stable")
    above = tree.parent[order]
    first = np.flatnonzero(np.append(True, above[1:] != above[:-1]))
    nth = np.arange(len(order)) - np.repeat(first, np.diff(np.append(first, len(order))))
    eldest = np.repeat(order[first], np.diff(np.append(first, len(order))))
    tokens[order] = 2 + (tokens[eldest] - 2 + nth) % (vocab - 2)
    return [tokens[tree.path(index)] for index in range(tree.num_trajectories)]


def shape_window(folder: Path, name: str, min_rows: int, vocab: int) -> list[np.ndarray]:
    """Trajectories of the first groups of a shape file that together have ``min_rows`` unique tokens.

    The first token of a group is its number, so that groups share nothing.
    """
    found: list[np.ndarray] = []
    rows = 0
    with gzip.open(folder / f"{name}.jsonl.gz", "rt") as lines:
        for number, line in enumerate(lines):
            group = json.loads(line)
            tree = RolloutTree.from_shape(group["parent"], group["length"], group["sample_node"])
            part = draw_tokens(tree, vocab, seed=number)
            for row in part:
                row[0] = 2 + number
            found += part
            rows += tree.num_tokens
            if rows >= min_rows:
                break
    return found


def spine(rows: int) -> RolloutTree:
    """A spine with a fork of 300 tokens every 1,000."""
    forks = max(1, rows // 1300)
    parent = [node for fork in range(forks) for node in (2 * fork - 2 if fork else -1, 2 * fork)]
    return RolloutTree.from_shape(parent, [1000, 300] * forks, list(range(1, 2 * forks, 2)))


def bush(rows: int) -> RolloutTree:
    """Full binary trees of five levels of 200 tokens each."""
    parent: list[int] = []
    for _ in range(max(1, rows // 6200)):
        first = len(parent)
        parent += [-1 if node == 0 else first + (node - 1) // 2 for node in range(31)]
    leaves = [node for node in range(len(parent)) if node not in set(parent)]
    return RolloutTree.from_shape(parent, [200] * len(parent), leaves)
