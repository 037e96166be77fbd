"""Sums of the routers of mixture-of-experts models, each token counted once per trajectory that passes through it.

========================  ============  ==========================================================================
name                      shape         sum over layers and tokens of
========================  ============  ==========================================================================
``router_probabilities``  ``[K, E]``    the router's probabilities, ``softmax(logits)``
``router_choices``        ``[K, E]``    1 for each of the k largest of them; has no gradient
========================  ============  ==========================================================================

========================  ============  ==========================================================================
name                      shape         sum over tokens of
========================  ============  ==========================================================================
``expert_load``           ``[L, E]``    1 for each expert that a token went to; has no gradient
``router_entropy``        ``[L]``       the entropy of the router's scores, in nats; has no gradient
========================  ============  ==========================================================================

``K`` slices of an update (:attr:`harts_hf.modeling.TreePass.slice_counts`), ``E`` experts, ``L`` layers with a router.
Where routers choose by other numbers than ``softmax(logits)`` (by sigmoids, a bias, groups), the load counts what they
chose, the choices of the auxiliary loss do not. The load-balancing loss of
the Switch Transformer (arXiv 2101.03961, equations 4 to 6), as Transformers and TRL compute it, is a function of the
two (:func:`load_balancing_loss`), so it is the same for every split into microbatches and over ranks.
"""

from typing import Any

import torch
from torch import nn

from harts_hf.modeling.outputs import EXPERT_LOAD, ROUTER_CHOICES, ROUTER_ENTROPY, ROUTER_PROBABILITIES, Sum
from harts_hf.modeling.routing import find_routers
from harts_hf.modeling.tree_pass import TreePass

ROUTER_SUMS = (ROUTER_PROBABILITIES, ROUTER_CHOICES)
LOAD_SUMS = (EXPERT_LOAD, ROUTER_ENTROPY)


def router_outputs(model: Any) -> dict[str, Sum]:
    """By name, what a model with routers answers besides; nothing for other models."""
    if not has_routers(model):
        return {}
    top_k: int = model.config.num_experts_per_tok

    def probabilities(output: Any, harts: TreePass) -> torch.Tensor:
        return _over_layers(output.router_logits, harts, torch.Tensor.double)

    def choices(output: Any, harts: TreePass) -> torch.Tensor:
        return _over_layers([logits.detach() for logits in output.router_logits], harts, lambda p: largest(p, top_k))

    asks = {"output_router_logits": True}
    sums = (
        Sum(name=ROUTER_PROBABILITIES, compute=probabilities, base_arguments=asks),
        Sum(name=ROUTER_CHOICES, compute=choices, base_arguments=asks),
        Sum(name=EXPERT_LOAD, compute=lambda _, harts: _stacked(harts.routes.load)),
        Sum(name=ROUTER_ENTROPY, compute=lambda _, harts: _stacked(harts.routes.entropy)),
    )
    return {one.name: one for one in sums}


def has_routers(model: nn.Module) -> bool:
    """Whether a causal language model has routed experts."""
    return bool(find_routers(model))


def _stacked(by_router: dict[int, torch.Tensor]) -> torch.Tensor:
    return torch.stack([by_router[number] for number in sorted(by_router)])


def _over_layers(logits: Any, harts: TreePass, of: Any) -> torch.Tensor:
    """``[K, E]``, the sum over layers and rows of a function of the probabilities ``[N, E]``.

    In float64: counts are exact, and neither autocast nor TF32 rounds the products.
    """
    counts = harts.slice_counts
    layers = [counts @ of(one.softmax(dim=-1)) for one in logits]
    return torch.stack(layers).sum(dim=0)


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """``[N, E]`` float64, 1 at the ``count`` largest of each row."""
    indices = values.topk(count, dim=-1).indices
    return torch.zeros_like(values, dtype=torch.float64).scatter_(-1, indices, 1.0)


def load_balancing_loss(probabilities: torch.Tensor, choices: torch.Tensor, top_k: int) -> torch.Tensor:
    """``E * sum_e f_e P_e``: fractions of the choices times mean probabilities, pooled over layers and tokens.

    Args:
        probabilities: ``[..., E]``, ``router_probabilities``.
        choices: ``[..., E]``, ``router_choices`` of the same tokens.
        top_k: choices per token and layer.

    Returns:
        ``[...]``, dtype of ``probabilities``; 0 where there are no tokens.
    """
    choices = choices.detach().to(probabilities)
    rows = (choices.sum(dim=-1, keepdim=True) / top_k).clamp(min=1)  # tokens times layers
    return choices.shape[-1] * (choices / rows * (probabilities / rows)).sum(dim=-1)
