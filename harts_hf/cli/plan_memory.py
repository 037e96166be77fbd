"""`harts plan --model MODEL --memory 141GB`: the limits that fit into a GPU beside a model."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from harts_hf.modeling import handed_sizes, with_handed_bytes
from harts_hf.modeling.memory import RowBytes, row_bytes
from harts_hf.planner import DEFAULT_COST, PlannerConfig
from harts_hf.runtime.budgets import MARGIN, Budget, DoesNotFitError, fitting_budget, parse_bytes
from harts_hf.trainers.memory import optimizer_bytes

OPTIMIZER = "adamw_torch_fused"  # Trainer's default


def states_bytes(model: nn.Module) -> float:
    """Bytes of weights, gradients and AdamW's states, all in the parameters' dtype, in a process that has them all."""
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return 2 * size + (optimizer_bytes(OPTIMIZER, sum(p.numel() for p in model.parameters()), size) or 0.0)


def fitted(memory: str, model: Any, config: PlannerConfig, *, chosen: bool) -> tuple[PlannerConfig, str]:
    """A configuration with the limits that fit and the model's handed bytes, and a line that says what fits.

    Args:
        memory: the option.
        model: on the meta device, in bfloat16.
        config: of the plan.
        chosen: whether its limits of rows were given, and stay.

    Raises:
        ValueError: no size.
        DoesNotFitError: the model leaves no room, even with gradient checkpointing.
        UnsupportedModelError: a model of no supported family.
    """
    size, states = parse_bytes("--memory", memory), states_bytes(model)
    room = size * (1 - MARGIN) - states
    with_checkpointing = fitting_budget(_rows(model, True), room)
    line = (
        f"{size / 1e9:,.0f} GB: {with_checkpointing.max_tokens:,} rows a microbatch fit with gradient checkpointing, "
        f"{_without(_rows(model, False), room)} without, beside {states / 1e9:,.1f} GB of weights, gradients and "
        f"AdamW ({MARGIN:.0%} left alone)"
    )
    config = replace(config, cost=with_handed_bytes(config.cost or DEFAULT_COST, handed_sizes(model, torch.bfloat16)))
    if not chosen:
        config = replace(config, **_limits(with_checkpointing))
    return config, line


def _limits(budget: Budget) -> dict[str, Any]:
    return {"max_tokens_per_microbatch": budget.max_tokens, "max_graph_tokens": budget.max_graph_tokens}


def _rows(model: nn.Module, checkpointing: bool) -> RowBytes:
    return row_bytes(model, dtype=torch.bfloat16, checkpointing=checkpointing, fused=True)


def _without(rows: RowBytes, room: float) -> str:
    try:
        return f"{fitting_budget(rows, room).max_tokens:,}"
    except DoesNotFitError:
        return "none"
