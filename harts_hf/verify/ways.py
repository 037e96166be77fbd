"""The ways of computing log-probs and gradients of trajectories on one model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import nn

from harts_hf.modeling import LOG_PROB, ROUTER_CHOICES, ROUTER_PROBABILITIES, load_balancing_loss, patch, unpatch
from harts_hf.planner import PlannerConfig
from harts_hf.runtime.functional import tree_logprobs, window_values
from harts_hf.runtime.window import TreeWindow
from harts_hf.tree import IntArray
from harts_hf.verify.layers import LayeredOracle
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
        gradients: by parameter, in the parameter's dtype; of ``(log_probs * weights).sum()``, and of the router's
            auxiliary loss over all trajectories, times a coefficient.
    """

    log_probs: torch.Tensor
    gradients: Gradients


def measure_tree(
    model: nn.Module,
    trajectories: Sequence[IntArray],
    weights: Sequence[torch.Tensor],
    planner: PlannerConfig,
    *,
    router_loss: float = 0.0,
) -> Measured:
    """The tree, on the patched model, which is unpatched again afterwards."""
    patch(model)
    try:
        if not router_loss:
            return _measured(model, tree_logprobs(model, trajectories, planner), weights)
        device = next(model.parameters()).device
        window = TreeWindow(trajectories, planner).to(device)
        values = window_values(model, window, (LOG_PROB, ROUTER_PROBABILITIES, ROUTER_CHOICES))
        rows = [torch.from_numpy(window.label_rows(i)).to(device) for i in range(len(trajectories))]
        auxiliary = load_balancing_loss(
            values.sums[ROUTER_PROBABILITIES][0], values.sums[ROUTER_CHOICES][0], _top_k(model)
        )
        return _measured(model, [values.rows[LOG_PROB][row] for row in rows], weights, router_loss * auxiliary)
    finally:
        unpatch(model)


def measure_expanded(
    model: nn.Module,
    trajectories: Sequence[IntArray],
    weights: Sequence[torch.Tensor],
    *,
    batch_size: int = 1,
    router_loss: float = 0.0,
) -> Measured:
    """The unpatched model on every trajectory by itself.

    Args:
        model: unpatched.
        trajectories: ``[L]`` token ids each.
        weights: ``[L - 1]`` each.
        batch_size: above 1, trajectories are padded on the right (where causal layers do not see it) and batched, the
            last ones first.
        router_loss: coefficient of the router's auxiliary loss.
    """
    order = list(range(len(trajectories)))
    if batch_size > 1:
        order.reverse()
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    sums: Gradients = {}
    log_probs: dict[int, torch.Tensor] = {}
    by_probability = router_loss * _derivatives(
        model, [[trajectories[i] for i in one] for one in batches], router_loss
    )
    for indices in batches:
        rows = [trajectories[i] for i in indices]
        values, probabilities = _expanded_log_probs(model, rows, with_routers=router_loss != 0)
        auxiliary = None if probabilities is None else (by_probability * probabilities.sum(dim=0)).sum()
        part = _measured(model, values, [weights[i] for i in indices], auxiliary)
        split = part.log_probs.split([len(row) - 1 for row in rows])
        log_probs.update(zip(indices, split, strict=True))
        for name, gradient in part.gradients.items():
            wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            sums[name] = sums[name] + wide if name in sums else wide
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    return Measured(
        log_probs=torch.cat([log_probs[i] for i in range(len(trajectories))]),
        # One after another leaves the sums: those of a whole model are large.
        gradients={name: sums.pop(name).to(dtypes[name]) for name in list(sums)},
    )


def measure_oracle(
    oracle: nn.Module | LayeredOracle,
    trajectories: Sequence[IntArray],
    weights: Sequence[torch.Tensor],
    *,
    router_loss: float = 0.0,
) -> Measured:
    """The expanded computation with every cast of the model's family lifted to float64.

    Of an oracle that is wide by layers, gradients are sums in float32.
    """
    if isinstance(oracle, LayeredOracle):
        return _measure_layered(oracle, trajectories, weights, router_loss)
    with float64_everywhere(oracle):
        return measure_expanded(oracle, trajectories, weights, router_loss=router_loss)


def _measure_layered(
    oracle: LayeredOracle, trajectories: Sequence[IntArray], weights: Sequence[torch.Tensor], router_loss: float
) -> Measured:
    model = oracle.model
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in trained.items()}
    log_probs = []
    with float64_everywhere(model), oracle.wide(sums, with_routers=router_loss != 0):
        by_probability = router_loss * _derivatives(model, [[tokens] for tokens in trajectories], router_loss)
        for tokens, weight in zip(trajectories, weights, strict=True):
            (values,), probabilities = _expanded_log_probs(model, [tokens], with_routers=router_loss != 0)
            loss = (values * weight.to(values)).sum()
            if probabilities is not None:
                loss = loss + (by_probability * probabilities.sum(dim=0)).sum()
            loss.backward()
            log_probs.append(values.detach())
    return Measured(log_probs=torch.cat(log_probs), gradients=sums)


def measure_rounded(
    model: nn.Module,
    trajectories: Sequence[IntArray],
    weights: Sequence[torch.Tensor],
    *,
    seed: int,
    router_loss: float = 0.0,
) -> Measured:
    """The expanded computation with every number moved at random: see :class:`RandomRoundings`."""
    with RandomRoundings(next(model.parameters()).device, seed):
        return measure_expanded(model, trajectories, weights, router_loss=router_loss)


def _top_k(model: nn.Module) -> int:
    found: int = model.config.num_experts_per_tok  # type: ignore[union-attr, assignment]
    return found


def _derivatives(model: nn.Module, batches: Sequence[Sequence[IntArray]], router_loss: float) -> Any:
    """``[E]``, of the auxiliary loss by a router's probability of one token in one layer: ``E f_e / (tokens layers)``.

    The loss is linear in probabilities once it is known where tokens go, so trajectories add up one at a time.
    """
    if not router_loss:
        return 0.0
    choices: Any = 0.0
    with torch.no_grad():
        for rows in batches:
            _, probabilities = _expanded_log_probs(model, rows, with_routers=True)
            assert probabilities is not None
            chosen = probabilities.topk(_top_k(model), dim=-1).indices.flatten()
            choices = choices + torch.bincount(chosen, minlength=probabilities.shape[-1]).double()
    rows_and_layers = choices.sum() / _top_k(model)
    return len(choices) * choices / rows_and_layers**2


def _expanded_log_probs(
    model: nn.Module, rows: Sequence[IntArray], *, with_routers: bool = False
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """``[L - 1]`` for each row of one right-padded batch; and routers' probabilities ``[layers * tokens, E]``."""
    device = next(model.parameters()).device
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.from_numpy(row.copy())
        mask[index, : len(row)] = 1
    ids, mask = ids.to(device), mask.to(device)
    padding = {} if len(rows) == 1 else {"attention_mask": mask}
    asked = {"output_router_logits": True} if with_routers else {}
    output = model(input_ids=ids, use_cache=False, **padding, **asked)
    logits = output.logits
    wide = torch.promote_types(logits.dtype, torch.float32)
    log_probs = [
        torch.log_softmax(one[: len(row) - 1].to(wide), dim=-1).gather(1, tokens[1 : len(row), None])[:, 0]
        for one, tokens, row in zip(logits, ids, rows, strict=True)
    ]
    if not with_routers:
        return log_probs, None
    real = mask.flatten().bool()
    return log_probs, torch.cat([layer.softmax(dim=-1)[real] for layer in output.router_logits])


def _measured(
    model: nn.Module,
    log_probs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    more: torch.Tensor | None = None,
) -> Measured:
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    loss = sum(
        ((values * weight.to(values)).sum() for values, weight in zip(log_probs, weights, strict=True)),
        start=torch.zeros((), device=log_probs[0].device) if more is None else more,
    )
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return Measured(
        log_probs=torch.cat([values.detach().double() for values in log_probs]),
        gradients={
            name: torch.zeros_like(parameter) if gradient is None else gradient
            for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True)
        },
    )
