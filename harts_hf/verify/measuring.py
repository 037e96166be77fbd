"""Log-probs and gradients of trajectories computed in several ways on one model."""

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from harts_hf.modeling import patch, unpatch
from harts_hf.planner import PlannerConfig
from harts_hf.runtime.functional import tree_logprobs
from harts_hf.tree import IntArray
from harts_hf.verify.widening import float64_everywhere

Gradients = dict[str, torch.Tensor]
# Bytes a parameter that the oracle holds: itself, a gradient and a sum of gradients, in float64.
_ORACLE_BYTES = 24


@dataclass(frozen=True, eq=False, kw_only=True)
class Measured:
    """What one way of computing gives.

    Attributes:
        log_probs: ``[P]`` float64, of all trajectories one after the other.
        gradients: by parameter, in the parameter's dtype; of ``(log_probs * weights).sum()``.
    """

    log_probs: torch.Tensor
    gradients: Gradients


def measure_tree(
    model: nn.Module, trajectories: Sequence[IntArray], weights: Sequence[torch.Tensor], planner: PlannerConfig
) -> Measured:
    """The tree, on the patched model, which is unpatched again afterwards."""
    patch(model)
    try:
        log_probs = tree_logprobs(model, trajectories, planner)
        return _measured(model, log_probs, weights)
    finally:
        unpatch(model)


def measure_expanded(
    model: nn.Module, trajectories: Sequence[IntArray], weights: Sequence[torch.Tensor], *, batch_size: int = 1
) -> Measured:
    """The unpatched model on every trajectory by itself.

    Args:
        model: unpatched.
        trajectories: ``[L]`` token ids each.
        weights: ``[L - 1]`` each.
        batch_size: above 1, trajectories are padded on the right (where causal layers do not see it) and batched, the
            last ones first.
    """
    order = list(range(len(trajectories)))
    if batch_size > 1:
        order.reverse()
    sums: Gradients = {}
    log_probs: dict[int, torch.Tensor] = {}
    for start in range(0, len(order), batch_size):
        numbers = order[start : start + batch_size]
        rows = [trajectories[i] for i in numbers]
        part = _measured(model, _expanded_log_probs(model, rows), [weights[i] for i in numbers])
        split = part.log_probs.split([len(row) - 1 for row in rows])
        log_probs.update(zip(numbers, split, strict=True))
        for name, gradient in part.gradients.items():
            wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            sums[name] = sums[name] + wide if name in sums else wide
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    return Measured(
        log_probs=torch.cat([log_probs[i] for i in range(len(trajectories))]),
        gradients={name: total.to(dtypes[name]) for name, total in sums.items()},
    )


def measure_oracle(oracle: nn.Module, trajectories: Sequence[IntArray], weights: Sequence[torch.Tensor]) -> Measured:
    """The expanded computation with every cast of the model's family lifted to float64."""
    with float64_everywhere(oracle):
        return measure_expanded(oracle, trajectories, weights)


def build_oracle(model: nn.Module) -> nn.Module | None:
    """A float64 copy of an unpatched model, or None if it does not fit into memory."""
    needed = sum(parameter.numel() for parameter in model.parameters()) * _ORACLE_BYTES
    if 1.5 * needed > _free_bytes(next(model.parameters()).device):
        return None
    oracle: Any = copy.deepcopy(model).double()
    if hasattr(oracle, "set_experts_implementation"):
        oracle.set_experts_implementation("eager")  # grouped products refuse float64
    return oracle


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _expanded_log_probs(model: nn.Module, rows: Sequence[IntArray]) -> list[torch.Tensor]:
    """``[L - 1]`` for each row of one right-padded batch."""
    device = next(model.parameters()).device
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.from_numpy(row.copy())
        mask[number, : len(row)] = 1
    ids, mask = ids.to(device), mask.to(device)
    padding = {} if len(rows) == 1 else {"attention_mask": mask}
    logits = model(input_ids=ids, use_cache=False, **padding).logits
    wide = torch.promote_types(logits.dtype, torch.float32)
    return [
        torch.log_softmax(one[: len(row) - 1].to(wide), dim=-1).gather(1, tokens[1 : len(row), None])[:, 0]
        for one, tokens, row in zip(logits, ids, rows, strict=True)
    ]


def _measured(model: nn.Module, log_probs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> Measured:
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    loss = sum(
        ((values * weight.to(values)).sum() for values, weight in zip(log_probs, weights, strict=True)),
        start=torch.zeros((), device=log_probs[0].device),
    )
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return Measured(
        log_probs=torch.cat([values.detach().double() for values in log_probs]),
        gradients={
            name: torch.zeros_like(parameter) if gradient is None else gradient
            for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True)
        },
    )
