"""Which PEFT methods run on trees, by what they need of a forward."""

from dataclasses import fields
from typing import Any

from torch import nn

from harts_hf.errors import UnsupportedModelError

# Methods that compute each token from its own row, by weights alone, as tests/modeling/test_adapters.py finds them to
# do. Others need the ids of a sequence, add positions, pool over tokens, draw random numbers or run the model twice.
METHODS = {
    "ADALORA", "BEFT", "BOFT", "C3A", "DEFT", "DELORA", "FOURIERFT", "FROD", "GLORA", "GRALORA", "HIRA", "HRA", "IA3",
    "LN_TUNING", "LOHA", "LOKR", "LORA", "MISS", "OFT", "OSF", "PEANUT", "PSOFT", "RANDLORA", "ROAD", "SHIRA",
    "SUPERTUNING", "TINYLORA", "TRAINABLE_TOKENS", "UNILORA", "VBLORA", "VERA", "WAVEFT",
}  # fmt: skip
# Options of LoRA under which that stays so; each of the others exchanges its forward or the model's layers.
LORA_OPTIONS = {
    "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out", "bias", "use_rslora",
    "modules_to_save", "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern",
    "trainable_token_indices", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "use_dora",
    "use_qalora", "qalora_group_size", "runtime_config", "lora_bias", "target_parameters", "use_bdlora", "kasa_config",
    "ensure_weight_tying", "megatron_core",
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
}  # fmt: skip


def check_adapters(model: nn.Module) -> None:
    """Refuses adapters whose forward would not be the same on a tree; cheap, so that every forward may ask.

    Args:
        model: a PEFT model, or the model inside one: PEFT keeps its configurations on both, in one dictionary.

    Raises:
        UnsupportedModelError: naming the method, or the option of it.
    """
    configs: dict[str, Any] = getattr(model, "peft_config", None) or {}
    for name, config in configs.items():
        method = getattr(config.peft_type, "value", config.peft_type)
        if method not in METHODS:
            raise UnsupportedModelError(
                f"expected an adapter that computes each token from its own row (LoRA; {', '.join(sorted(METHODS))}), "
                f"got {method} in adapter {name!r}"
            )
        for option in fields(config):
            value = getattr(config, option.name)
            if option.name.endswith("dropout") and value:
                raise UnsupportedModelError(
                    f"expected dropout 0 everywhere, got {option.name} = {value} in adapter {name!r}: set "
                    f"{option.name}=0"
                )
            if method == "LORA" and option.name not in LORA_OPTIONS and value:
                raise UnsupportedModelError(
                    f"expected a LoRA that computes each token from its own row, got {option.name}={value} in adapter "
                    f"{name!r}"
                )
