"""The registry's families as models of random weights."""

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu.registry import FAMILIES, SEED, TINY


def configuration(family: str, widths: dict[str, int] | None = None) -> Any:
    """Of a family; with others' values for the ``widths`` that it has."""
    real = FAMILIES[family]
    return AutoConfig.for_model(family, **{**real, **{k: v for k, v in (widths or {}).items() if k in real}})


def build_model(family: str, dry: bool) -> nn.Module:
    """In bf16 on the GPU; if ``dry``, tiny in float32 on the CPU."""
    torch.manual_seed(SEED)
    if dry:
        model = AutoModelForCausalLM.from_config(configuration(family, TINY), experts_implementation="eager")
    else:
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(configuration(family), dtype=torch.bfloat16)
    return model.train()
