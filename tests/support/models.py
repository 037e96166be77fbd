"""Tiny models of every supported family, built from configurations (nothing is downloaded)."""

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 48

_COMMON = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "pad_token_id": 0, "eos_token_id": 1}
_MLA = {
    "q_lora_rank": 12,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
_GDN = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_SOFTMAX_MOE = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_LAYERS = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_CONFIGS = {
    "bailing_hybrid": {
        **_COMMON,
        **_MLA,
        **_LAYERS,
        "head_dim": 8,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "kimi_linear": {
        **_COMMON,
        **{key: value for key, value in _MLA.items() if key != "q_lora_rank"},
        **_LAYERS,
        "linear_head_dim": 8,
        "linear_num_heads": 2,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "olmo_hybrid": {
        **_COMMON,
        **_GDN,
        **_LAYERS,
        "intermediate_size": 48,
        "linear_num_key_heads": 4,
        "linear_allow_neg_eigval": True,
    },
    "qwen3_5_moe_text": {**_COMMON, **_GDN, **_LAYERS, **_SOFTMAX_MOE},
    "qwen3_5_text": {**_COMMON, **_GDN, **_LAYERS, "intermediate_size": 48},
    "qwen3_next": {**_COMMON, **_GDN, **_LAYERS, **_SOFTMAX_MOE, "intermediate_size": 48},
}
SHALLOW = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
FAMILIES = sorted(_CONFIGS)
# Between them both linear rules, latent and ordinary attention, experts and dense layers.
OF_EACH_KIND = ["bailing_hybrid", "qwen3_5_text"]
OTHERS = [family for family in FAMILIES if family not in OF_EACH_KIND]
LATENT_FAMILIES = [family for family in FAMILIES if "kv_lora_rank" in _CONFIGS[family]]
MOE_FAMILIES = [family for family in FAMILIES if "moe_intermediate_size" in _CONFIGS[family]]


def tiny_model(
    family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, omit: tuple[str, ...] = (), **overrides
) -> nn.Module:
    """A model of three layers; norms and gates are drawn at random too, so that no parameter hides at 0 or 1."""
    torch.manual_seed(seed)
    options = {**_CONFIGS[family], **overrides}
    config = AutoConfig.for_model(family, **{key: value for key, value in options.items() if key not in omit})
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    is_tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(noise * (0.5 if "embed" in name and not is_tied else 0.6 / parameter.shape[-1] ** 0.5))
            elif "A_log" in name or "dt_bias" in name:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(parameter + 0.1 * noise)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    return model.to(dtype).train()


def shallow_model(family: str, **options) -> nn.Module:
    """`tiny_model` with one layer of each kind, experts in the second: for what does not depend on depth, as losses.

    The stock model's linear layer in float64 is most of what a plain loop over trajectories takes.
    """
    mlps = {"mlp_layer_types": ["dense", "sparse"]} if "mlp_layer_types" in _CONFIGS[family] else {}
    return tiny_model(family, **options, **SHALLOW, **mlps)
