"""What the routers of a forward choose: noted as they run, counted, or replayed from another forward.

A hook on each router sees its answer ``(logits [N, E], weights [N, k], experts [N, k])``. Activation checkpointing
computes a layer twice, the second time on a thread of autograd's; choices that are noted the second time take the
place of the first, and are counted once.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from harts_hf.modeling.outputs import EXPERT_LOAD, ROUTER_ENTROPY
from harts_hf.modeling.tree_pass import TreePass

_state = threading.local()
# Attributes of a router: which of the model's it is, from 0, and its hook.
NUMBER = "_harts_router_number"
_HANDLE = "_harts_router_hook"


@contextmanager
def routing(tree_pass: TreePass) -> Iterator[None]:
    """Inside, and on this thread, routers run for a forward on a tree."""
    before = getattr(_state, "tree_pass", None)
    _state.tree_pass = tree_pass
    try:
        yield
    finally:
        _state.tree_pass = before


def find_routers(model: nn.Module) -> list[nn.Module]:
    """The routers of a model, in the order of their layers."""
    return [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]


def watch_routers(model: nn.Module) -> None:
    """Puts the hook on every router of a model."""
    for number, router in enumerate(find_routers(model)):
        setattr(router, NUMBER, number)
        setattr(router, _HANDLE, router.register_forward_hook(_see))


def unwatch_routers(model: nn.Module) -> None:
    """Undoes :func:`watch_routers`."""
    for router in find_routers(model):
        if hasattr(router, _HANDLE):
            getattr(router, _HANDLE).remove()
            delattr(router, _HANDLE)
            delattr(router, NUMBER)


def _see(router: Any, _: Any, answer: Any) -> Any:
    tree_pass: TreePass | None = getattr(_state, "tree_pass", None)
    if tree_pass is None:
        return None  # the answer as it is
    logits, _, experts = answer
    routes, number = tree_pass.routes, getattr(router, NUMBER)
    routes.chosen[number] = experts.detach()
    if routes.replayed is not None:
        replayed = routes.replayed[number].long()
        experts = torch.where(replayed < 0, experts, replayed)
    is_counted = number in routes.load  # a recomputation's choices are those of the forward
    if not is_counted and not {EXPERT_LOAD, ROUTER_ENTROPY}.isdisjoint(tree_pass.wanted.names):
        counts = tree_pass.batch.occurrence_counts[0].double()
        routes.load[number] = expert_load(experts, counts, logits.shape[-1])
        routes.entropy[number] = counts @ routing_entropy(router, logits.detach()).double()
    if routes.replayed is None:
        return None
    return logits, weights_at(router, logits, experts).to(answer[1].dtype), experts


def expert_load(experts: torch.Tensor, counts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """``[E]`` float64, how many trajectories' tokens went to each expert: integers, exact in any order of addition.

    Args:
        experts: ``[N, k]`` chosen ones.
        counts: ``[N]`` float64, trajectories through each row.
        num_experts: E.
    """
    total = torch.zeros(num_experts, dtype=torch.float64, device=counts.device)
    return total.index_add_(0, experts.reshape(-1), counts.repeat_interleave(experts.shape[-1]))


def scores_of(router: Any, logits: torch.Tensor) -> torch.Tensor:
    """``[N, E]`` what a router chooses by and weighs with, without a bias: sigmoids where it has one, else softmax."""
    if has_bias(router):
        return logits.sigmoid()
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.softmax(dim=-1, dtype=wide)


def has_bias(router: Any) -> bool:
    """Whether a router scores by sigmoids and chooses by them and a bias (DeepSeek-V3, arXiv 2412.19437)."""
    return hasattr(router, "e_score_correction_bias")


def routing_entropy(router: Any, logits: torch.Tensor) -> torch.Tensor:
    """``[N]`` entropy in nats of the scores as a distribution over experts."""
    scores = scores_of(router, logits)
    shares = scores / scores.sum(dim=-1, keepdim=True)
    return -torch.xlogy(shares, shares).sum(dim=-1)


def weights_at(router: Any, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """``[N, k]`` the weights that a router gives certain experts, differentiable by its logits.

    Args:
        router: of a supported family.
        logits: ``[N, E]``, its answer's.
        experts: ``[N, k]``.
    """
    weights = scores_of(router, logits).gather(-1, experts)
    if has_bias(router):
        if router.norm_topk_prob:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * router.routed_scaling_factor
    # Qwen3.5's routers always do, and have no setting for it.
    return weights / weights.sum(dim=-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else weights
