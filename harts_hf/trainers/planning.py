"""The planner of a trainer's windows."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from harts_hf.modeling import handed_sizes, vocab_size_of, with_handed_bytes
from harts_hf.planner import DEFAULT_COST
from harts_hf.runtime.planning import WindowPlanner


def planner_of(trainer: Any, model: nn.Module) -> WindowPlanner:
    """Plans windows of a model by a trainer's settings."""
    config, stored = trainer.args.planner_config(), next(model.parameters()).dtype
    sizes = handed_sizes(
        model,
        torch.bfloat16 if trainer.args.bf16 else stored,
        keys_dtype=stored,  # autocast leaves what rotary embeddings and norms return in float32
        expand_latents=trainer.args.tree_handoff_latents == "expanded",
    )
    cost = with_handed_bytes(config.cost or DEFAULT_COST, sizes)
    return WindowPlanner(config=replace(config, cost=cost), vocab_size=vocab_size_of(model))
