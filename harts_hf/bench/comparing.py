"""Runs that are compared: a step of a side with the sketch of its gradient, and all sides on the same routes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from harts_hf.bench import sides
from harts_hf.bench.parity import Parity, StepResult, compare, judge_flips, relative_difference, sketch_gradients
from harts_hf.bench.rollouts import StepRollouts
from harts_hf.bench.same_routes import ReplayInStock, record_routes
from harts_hf.bench.sides import PACKED, TREE, Setting, Side, build_side
from harts_hf.trainers import TreeGRPOConfig

SMALLEST = 64  # tokens of a microbatch
_FLIPS = "tree/engine_routing_flips"


def compared_step(side: Side) -> StepResult:
    """One step, and what it came to."""
    sketches: list[dict[str, torch.Tensor]] = []
    side.clock.on_gradients = lambda: sketches.append(sketch_gradients(side.trainer.model))
    try:
        log = side.step()
    finally:
        side.clock.on_gradients = None
    return StepResult(sketch=sketches[0], grad_norm=log.get("grad_norm"), loss=log["loss"], entropy=log["entropy"])


def settings_on_same_routes(chosen: Sequence[Setting], rollouts: StepRollouts, budget: int) -> list[Setting]:
    """Stock TRL if it was chosen, without padding, and the tree in one microbatch or few, and in half as large ones.

    Args:
        chosen: what is timed.
        rollouts: that are compared.
        budget: of a side that is not among these.
    """
    size_of = {setting.kind: setting.size for setting in chosen}
    stock = [Setting(kind=kind, size=1) for kind in sides.STOCK_KINDS if kind in size_of][:1]
    packed = min(size_of.get(PACKED, budget), rollouts.num_tokens)
    tree = min(size_of.get(TREE, budget), rollouts.tree.num_tokens)
    wanted = [(PACKED, packed), *([] if stock else [(PACKED, packed // 2)]), (TREE, tree), (TREE, tree // 2)]
    return [*stock, *dict.fromkeys(Setting(kind=kind, size=max(SMALLEST, size)) for kind, size in wanted)]


def compare_on_same_routes(
    model: nn.Module,
    rollouts: StepRollouts,
    args: TreeGRPOConfig,
    tokenizer: Any,
    settings: Sequence[Setting],
    dtype: torch.dtype,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    old_log_probs: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Parity:
    """The verdict on steps whose routers take the experts that the tree noted first.

    Args:
        model: a mixture of experts, unpatched.
        rollouts: that are compared.
        args: of all sides.
        tokenizer: of the trainers.
        settings: of :func:`settings_on_same_routes`.
        dtype: that the model computes in.
        optimizer: as for :func:`harts_hf.bench.sides.build_side`.
        old_log_probs: whether TRL scores old log-probs in each step.
        progress: is told what is done at the moment.
    """
    size = next(setting.size for setting in settings if setting.kind == TREE)
    progress("noting routes")
    known = record_routes(model, rollouts, args, tokenizer, size=size, optimizer=optimizer)
    assert known.routes is not None
    results, flips = {}, {}
    for setting in settings:
        progress(f"comparing {setting.label} on the same routes")
        side = build_side(
            setting, model, known, args, tokenizer, optimizer=optimizer, old_log_probs=old_log_probs
        )  # fmt: skip
        is_stock = setting.kind in sides.STOCK_KINDS
        replay = ReplayInStock(side.trainer.model, known.token_ids, known.routes) if is_stock else None
        results[setting.label] = compared_step(side)
        flips[setting.label] = side.log[_FLIPS] if replay is None else replay.flips
        if replay is not None:
            replay.remove()
    judged = [name for name in results if name.startswith(TREE)]
    verdict = compare(results, judged, dtype)
    packed = next(name for name in results if name.startswith(PACKED))
    from_packed = {
        name: relative_difference(results[name].sketch, results[packed].sketch)
        for name in results
        if name != packed and name.startswith((PACKED, TREE))
    }
    return replace(
        verdict, routes="same", flips=flips, from_packed=from_packed, tokens=rollouts.num_tokens,
        trajectories=len(rollouts.token_ids),
        failures=[*verdict.failures, *judge_flips(flips, dtype)],
    )  # fmt: skip
