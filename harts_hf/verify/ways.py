"""The ways of computing log-probs and gradients of trajectories on one model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import nn

from harts_hf.modeling import patch, unpatch
from harts_hf.planner import PlannerConfig
from harts_hf.runtime.functional import tree_logprobs
from harts_hf.tree import IntArray
from harts_hf.verify.oracle import float64_everywhere
from harts_hf.verify.roundings import RandomRoundings

Way = Literal[
    "expanded", "expanded again", "expanded re-batched", "expanded, rounded", "tree", "tree in parts", "oracle"
]
EXPANDED: Final = "expanded"
AGAIN: Final = "expanded again"
BATCHED: Final = "expanded re-batched"
ROUNDED: Final = "expanded, rounded"
TREE: Final = "tree"
PARTS: Final = "tree in parts"
ORACLE: Final = "oracle"
# The ways that are judged.
JUDGED: tuple[Way, ...] = (TREE, PARTS)

Gradients = dict[str, torch.Tensor]


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
        indices = order[start : start + batch_size]
        rows = [trajectories[i] for i in indices]
        part = _measured(model, _expanded_log_probs(model, rows), [weights[i] for i in indices])
        split = part.log_probs.split([len(row) - 1 for row in rows])
        log_probs.update(zip(indices, split, strict=True))
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


def measure_rounded(
    model: nn.Module, trajectories: Sequence[IntArray], weights: Sequence[torch.Tensor], *, seed: int
) -> Measured:
    """The expanded computation with every number moved at random: see :class:`RandomRoundings`."""
    with RandomRoundings(next(model.parameters()).device, seed):
        return measure_expanded(model, trajectories, weights)


def _expanded_log_probs(model: nn.Module, rows: Sequence[IntArray]) -> list[torch.Tensor]:
    """``[L - 1]`` for each row of one right-padded batch."""
    device = next(model.parameters()).device
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.from_numpy(row.copy())
        mask[index, : len(row)] = 1
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
