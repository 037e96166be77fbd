"""The models of the benchmark, random weights."""

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu.registry import DRY_EXPERTS, PERIOD_OF_4, STEP_MODELS, TINY

DRY_LAYERS = 4
MODELS = {
    **STEP_MODELS,
    "qwen3.5-moe-8b": ("qwen3_5_moe_text", {
        "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1, "vocab_size": 248320, "hidden_size": 2048,
        "num_hidden_layers": 20, "layer_types": PERIOD_OF_4 * 5, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 384,
        "shared_expert_intermediate_size": 512, "router_aux_loss_coef": 0.0,
    }),
}  # fmt: skip


def build(name: str, *, dry: bool, layers: int | None = None) -> nn.Module:
    """Random weights, in bf16 on the GPU, the first ``layers`` alone if a number is given; if ``dry``, few and tiny
    layers in float32 on the CPU."""
    family, whole = MODELS[name]
    if layers is not None:
        whole = {**whole, "num_hidden_layers": layers, "layer_types": whole["layer_types"][:layers]}
    torch.manual_seed(0)
    if dry:
        small = {key: value for key, value in {**TINY, **DRY_EXPERTS, "vocab_size": 512}.items() if key in whole}
        few = {"num_hidden_layers": DRY_LAYERS, "layer_types": whole["layer_types"][:DRY_LAYERS]}
        config = AutoConfig.for_model(family, **{**whole, **small, **few})
        return AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(family, **whole), dtype=torch.bfloat16, attn_implementation="sdpa"
        )


def skew_routers(model: nn.Module, deviation: float) -> None:
    """Scales each expert's row of every router by a log-normal number, so that some are chosen far more often."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if "Router" in type(module).__name__ and isinstance(getattr(module, "weight", None), nn.Parameter):
            scale = torch.randn(len(module.weight), generator=generator).mul(deviation).exp()
            module.weight.data.mul_(scale.to(module.weight)[:, None])
