"""Norms, gates and experts of stock models as single operations, within a forward on a tree and on a GPU alone.

Modules are exchanged as mixers are: the instance gets a subclass of its class, whose forward is the stock one except
while a layer runs for a tree. Nothing of a model file is copied, parameters stay where they are, and
:func:`harts_hf.unpatch` gives the classes back. On the CPU, and without a plan, the stock forward runs as it is.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from transformers.activations import SiLUActivation
from transformers.integrations.moe import _default_apply_gate, _grouped_linear
from transformers.modeling_layers import GradientCheckpointingLayer

from harts_hf.errors import UnsupportedModelError
from harts_hf.kernels import experts
from harts_hf.kernels.rowwise import decay_gate, gated_rms_norm, rms_norm, rotate, swiglu
from harts_hf.modeling.families import Family
from harts_hf.modeling.routing import routing
from harts_hf.modeling.tree_pass import TreePass

Forward = Callable[..., Any]
Pair = tuple[nn.Module, type[nn.Module]]

# Whether a layer runs for a tree, and its modules may be fused; a recomputation runs on a thread of autograd's.
_state = threading.local()


class FusedModule(nn.Module):
    """Marks a module, or a layer, whose class :func:`harts_hf.patch` exchanged; never instantiated by itself.

    Attributes:
        stock: the class that was exchanged.
    """

    stock: type[nn.Module]


@contextmanager
def fusing(wanted: bool) -> Iterator[None]:
    """Inside, and on this thread, fused modules run as one operation if that is wanted."""
    before = getattr(_state, "fuses", False)
    _state.fuses = wanted
    try:
        yield
    finally:
        _state.fuses = before


def fuses(x: torch.Tensor) -> bool:
    """Whether a fused module is to run as one operation on this input."""
    return x.is_cuda and getattr(_state, "fuses", False)


def find_fused(model: nn.Module, family: Family) -> list[Pair]:
    """Modules of a model and the classes to give them: its layers, and what of :data:`FUSED` they have.

    A module whose forward was replaced, or whose settings are not those that an operation is for (another activation,
    biases), is left as it is.
    """
    known = {family.class_named(name): made for name, made in FUSED.get(family.model_type, {}).items()}
    mixers = (family.class_named(family.linear_mixer), family.class_named(family.full_mixer))
    found: list[Pair] = []  # mypy does not see that classes are hashable
    for module in model.modules():
        stock = type(module)
        if "forward" in vars(module):
            continue
        if isinstance(module, GradientCheckpointingLayer) and any(isinstance(m, mixers) for m in module.children()):
            found.append((module, _layer_class(stock)))  # type: ignore[arg-type]
        elif stock in known and _IS_FOR.get(known[stock], lambda _: True)(module):
            found.append((module, _fused_class(stock, known[stock])))  # type: ignore[arg-type]
    return found


def check_layers(model: nn.Module) -> None:
    """Refuses a model with a layer that would not replay routes when checkpointing computes it again.

    Raises:
        UnsupportedModelError: a layer whose forward was replaced before :func:`harts_hf.patch`.
    """
    for name, module in model.named_modules():
        if isinstance(module, GradientCheckpointingLayer) and not isinstance(module, FusedModule):
            raise UnsupportedModelError(
                f"expected layers with the forward of their class where routes are replayed, got another one on {name}"
            )


@lru_cache
def _layer_class(stock: type[nn.Module]) -> type[nn.Module]:
    """A layer that tells its modules, also when checkpointing computes it again, that it runs for a tree."""

    def forward(self: nn.Module, *args: Any, harts: TreePass | None = None, **kwargs: Any) -> Any:
        if harts is None:
            return stock.forward(self, *args, **kwargs)
        with fusing(harts.fused_modules), routing(harts):
            return stock.forward(self, *args, harts=harts, **kwargs)

    return _subclass(stock, forward)


@lru_cache
def _fused_class(stock: type[nn.Module], fused: Forward) -> type[nn.Module]:
    def forward(self: nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (fused if fuses(x) else stock.forward)(self, x, *args, **kwargs)

    return _subclass(stock, forward)


def _subclass(stock: type[nn.Module], forward: Forward) -> type[nn.Module]:
    # The stock name stays, since Transformers, PEFT and FSDP settings find modules by class name.
    return type(
        stock.__name__, (stock, FusedModule), {"forward": forward, "__module__": stock.__module__, "stock": stock}
    )


def _llama_norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return rms_norm(hidden_states, self.weight, eps=self.variance_epsilon, rounds_first=True)


def _olmo_norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return rms_norm(hidden_states, self.weight, eps=self.variance_epsilon)


def _centred_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    return rms_norm(x, self.weight, eps=self.eps, offset=1.0)


def _kimi_output_norm(self: Any, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return gated_rms_norm(hidden_states, gate, self.weight, eps=self.variance_epsilon, activation="sigmoid")


def _gated_output_norm(self: Any, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return gated_rms_norm(
        hidden_states, gate, self.weight, eps=self.variance_epsilon, activation="silu", rounds_first=True
    )


def _mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
    gate, up = self.gate_proj(x), self.up_proj(x)
    same = gate.dtype == up.dtype  # an adapter may widen one of them
    return self.down_proj(swiglu(gate, up) if same else self.act_fn(gate) * up)


def _bounded_decays(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    bound = self.lower_bound if self.safe_gate else None
    return decay_gate(self.f_proj(hidden_states), self.A_log, self.dt_bias, bound=bound, dtype=hidden_states.dtype)


def _decays(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    x = self.f_b_proj(self.f_a_proj(hidden_states))
    return decay_gate(x, self.A_log.reshape(-1), self.dt_bias, bound=None, dtype=torch.float32)


def _experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    if self._is_expert_parallel or self.config._experts_implementation != "grouped_mm":
        return type(self).stock.forward(self, hidden_states, top_k_index, top_k_weights)
    order = experts.order_by_expert(top_k_index, self.num_experts)
    rows = experts.expand(hidden_states.to(self.gate_up_proj.dtype), order)
    both = _grouped_linear(rows, self.gate_up_proj, order.ends)
    gated = experts.weighted_swiglu(both, top_k_weights, order)
    return experts.combine(_grouped_linear(gated, self.down_proj, order.ends), order).to(hidden_states.dtype)


def rotary_of(family: Family) -> dict[str, Forward]:
    """The function of a family's module through which its attention turns queries and keys, as one operation each."""
    if family.model_type not in _ROTARY:
        return {}
    name, interleaved = _ROTARY[family.model_type]
    stock: Forward = getattr(family.module, name)

    def turned(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any) -> Any:
        if args or not fuses(q):
            return stock(q, k, cos, sin, *args)
        return rotate(q, cos, sin, interleaved=interleaved), rotate(k, cos, sin, interleaved=interleaved)

    return {name: turned}


def expanded_latents(self: Any, latents: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values ``[1, H, N, D]`` of an MLA's latents ``[1, 1, N, L]`` and rotary keys ``[1, 1, N, R]``, rows
    first in memory: one copy, whose backward is views, where stock layers write into slices of an empty tensor."""
    both = self.kv_b_proj(latents).squeeze(1).unflatten(-1, (-1, self.qk_nope_head_dim + self.v_head_dim))
    keys, values = both.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
    keys = torch.cat([keys, rotary.transpose(1, 2).expand(-1, -1, keys.shape[2], -1)], dim=-1)
    return keys.transpose(1, 2), values.transpose(1, 2)


def _router(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = hidden_states.view(-1, self.hidden_dim)
    device = rows.device.type
    if torch.is_autocast_enabled(device):
        # Stock routers ask for float32, and autocast multiplies in its dtype all the same: so must this, or experts
        # would be others.
        logits = nn.functional.linear(rows, self.weight)
    else:
        logits = nn.functional.linear(rows.float(), self.weight.float())
    weights, chosen = experts.route(
        logits.sigmoid(), self.e_score_correction_bias, groups=self.num_group, kept_groups=self.topk_group,
        count=self.top_k, normalizes=self.norm_topk_prob, factor=self.routed_scaling_factor,
    )  # fmt: skip
    return logits, weights, chosen


def _is_swiglu(module: Any) -> bool:
    return isinstance(module.act_fn, nn.SiLU | SiLUActivation)


def _is_plain_experts(module: Any) -> bool:
    settings = (module.has_bias, module.is_transposed, module.has_post_expert_norm, not module.has_gate)
    return not any(settings) and _is_swiglu(module) and type(module)._apply_gate is _default_apply_gate


# By model_type, the name of the rotary function, and whether it reads pairs side by side.
_ROTARY = {
    "bailing_hybrid": ("apply_rotary_pos_emb_interleave", True),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), ("apply_rotary_pos_emb", False)),
}


def _has_powers_of_two(module: Any) -> bool:
    return all(size & (size - 1) == 0 for size in (module.num_experts, module.num_group))


# Settings that an operation is for, where a module may have others.
_IS_FOR: dict[Forward, Callable[[Any], bool]] = {
    _mlp: _is_swiglu,
    _experts: _is_plain_experts,
    _router: _has_powers_of_two,
}

_KIMI: dict[str, Forward] = {
    "RMSNorm": _llama_norm,
    "RMSNormGated": _kimi_output_norm,
    "MLP": _mlp,
    "Experts": _experts,
    "TopkRouter": _router,
}
_QWEN: dict[str, Forward] = {"RMSNorm": _centred_norm, "RMSNormGated": _gated_output_norm, "MLP": _mlp}


def _named(prefix: str, forwards: dict[str, Forward]) -> dict[str, Forward]:
    return {prefix + name: forward for name, forward in forwards.items()}


# What each family gets: classes of its modeling module, by name, and their forwards on a tree. One without an entry
# runs its stock modules.
FUSED: dict[str, dict[str, Forward]] = {
    "bailing_hybrid": _named("BailingHybrid", {**_KIMI, "ForgetGate": _bounded_decays}),
    "kimi_linear": _named("KimiLinear", {**_KIMI, "ForgetGate": _decays}),
    "qwen3_5_text": _named("Qwen3_5", _QWEN),
    "qwen3_5_moe_text": _named("Qwen3_5Moe", {**_QWEN, "Experts": _experts}),
    "qwen3_next": _named("Qwen3Next", {**_QWEN, "Experts": _experts}),
    "olmo_hybrid": _named("OlmoHybrid", {"RMSNorm": _olmo_norm, "RMSNormGated": _gated_output_norm, "MLP": _mlp}),
}
