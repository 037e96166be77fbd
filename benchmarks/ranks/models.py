"""The models of the jobs, random weights."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu.registry import DRY_EXPERTS, SEED, STEP_MODELS, TINY

NAME, LAYER = "ling-3.0-tiny", "BailingHybridDecoderLayer"
FLASH = "ling-3.0-flash"  # Transformers' default configuration of bailing_hybrid is this model's
PARITY_LAYERS = 4
# Every token takes every expert, so that no rounding sends it to another one. In bfloat16 gradients of any two kernels
# differ by as much as they are large where experts are chosen at random weights (docs/performance.md).
ALL_EXPERTS = {
    "num_local_experts": 8, "num_experts": 8, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1,
}  # fmt: skip


def configuration(layers: int | None, *, parity: bool, dry: bool) -> Any:
    """Ling-3.0-tiny's, with so many of its layers (all if None)."""
    family, whole = STEP_MODELS[NAME]
    small = {key: value for key, value in {**TINY, **DRY_EXPERTS, "vocab_size": 512}.items() if key in whole}
    options = {**whole, **(small if dry else {}), **(ALL_EXPERTS if parity else {})}
    count = PARITY_LAYERS if dry or parity else layers or whole["num_hidden_layers"]
    options |= {"num_hidden_layers": count, "layer_types": whole["layer_types"][:count]}
    return AutoConfig.for_model(family, **options)


def flash_configuration(layers: int | None, *, dry: bool) -> Any:
    """Ling-3.0-flash's widths and first layers; if ``dry``, tiny ones."""
    whole = AutoConfig.for_model("bailing_hybrid")
    count = layers or whole.num_hidden_layers
    small = {**TINY, **DRY_EXPERTS, "vocab_size": 512, "num_experts_per_token": 2, "num_expert_group": 4}
    small = {name: value for name, value in small.items() if dry and hasattr(whole, name)}
    return AutoConfig.for_model(
        "bailing_hybrid", **{**small, "num_hidden_layers": count, "layer_types": whole.layer_types[:count]},
        pad_token_id=0, eos_token_id=1, bos_token_id=1,
    )  # fmt: skip


def build(config: Any, *, device: str, dtype: torch.dtype, seed: int = SEED) -> nn.Module:
    """Random weights, the same on every rank."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return with_whole_experts(model, device)


def with_whole_experts(model: nn.Module, device: str) -> nn.Module:
    """On a CPU all experts run at once: ranks would wait for those of another one otherwise."""
    if device == "cpu":
        model.set_experts_implementation("batched_mm")  # type: ignore[operator]
    return model


def trained(model: nn.Module) -> Sequence[tuple[str, nn.Parameter]]:
    """Names and parameters, in an order that all ranks and backends have."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
