"""How the windows of a trainer are planned and run."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from harts_hf.modeling import handed_sizes, vocab_size_of, with_handed_bytes
from harts_hf.planner import DEFAULT_COST
from harts_hf.runtime import RunOptions
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


def run_options_of(trainer: Any) -> RunOptions:
    """How forwards run by a trainer's settings."""
    args = trainer.args
    return RunOptions(
        temperature=trainer.temperature,  # TRL's own head keeps what it is at the start, too
        head_in_fp32=getattr(args, "cast_lm_head_to_fp32", False),
        context=trainer.compute_loss_context_manager,
        offload=args.tree_offload_handoff,
        expand_latents=args.tree_handoff_latents == "expanded",
        deterministic=args.tree_deterministic,
        fused_modules=args.tree_fused_modules == "auto",
        replay_routing=args.tree_replay_routing != "off",
    )
