"""Forwards of norms, gates, experts and routers as single operations, for classes that a family names.

Each takes what the stock forward takes, the module first, and gives the same but for rounding: shapes are those of the
module. The names of parameters and settings are Transformers' own; a class with others needs a forward of its own.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.activations import SiLUActivation
from transformers.integrations.moe import _default_apply_gate, _grouped_linear

from harts_hf.kernels import experts
from harts_hf.kernels.rowwise import decay_gate, gated_rms_norm, rms_norm, swiglu

Forward = Callable[..., Any]


def llama_norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """RMS norm as Llama's: rounded to the input's dtype before the weight multiplies it."""
    return rms_norm(hidden_states, self.weight, eps=self.variance_epsilon, rounds_first=True)


def olmo_norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """RMS norm that is rounded once, after its weight."""
    return rms_norm(hidden_states, self.weight, eps=self.variance_epsilon)


def centred_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    """RMS norm whose weight is one plus the parameter, as Qwen3.5's."""
    return rms_norm(x, self.weight, eps=self.eps, offset=1.0)


def kimi_output_norm(self: Any, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """RMS norm of a linear mixer's output, times the sigmoid of the gate."""
    return gated_rms_norm(hidden_states, gate, self.weight, eps=self.variance_epsilon, activation="sigmoid")


def gated_output_norm(self: Any, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """RMS norm of a linear mixer's output, rounded before its weight, times the SiLU of the gate."""
    return gated_rms_norm(
        hidden_states, gate, self.weight, eps=self.variance_epsilon, activation="silu", rounds_first=True
    )


def mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
    """SwiGLU between ``gate_proj``, ``up_proj`` and ``down_proj``."""
    gate, up = self.gate_proj(x), self.up_proj(x)
    same = gate.dtype == up.dtype  # an adapter may widen one of them
    return self.down_proj(swiglu(gate, up) if same else self.act_fn(gate) * up)


def bounded_decays(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Log-decays of a KDA per channel, in the hidden states' dtype, with a lower bound if ``safe_gate``."""
    bound = self.lower_bound if self.safe_gate else None
    return decay_gate(self.f_proj(hidden_states), self.A_log, self.dt_bias, bound=bound, dtype=hidden_states.dtype)


def decays(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Log-decays of a KDA per channel, in float32."""
    x = self.f_b_proj(self.f_a_proj(hidden_states))
    return decay_gate(x, self.A_log.reshape(-1), self.dt_bias, bound=None, dtype=torch.float32)


def grouped_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """SwiGLU experts as grouped products; the stock forward for other implementations of experts."""
    if self._is_expert_parallel or self.config._experts_implementation != "grouped_mm":
        return type(self).stock.forward(self, hidden_states, top_k_index, top_k_weights)
    order = experts.order_by_expert(top_k_index, self.num_experts)
    rows = experts.expand(hidden_states.to(self.gate_up_proj.dtype), order)
    both = _grouped_linear(rows, self.gate_up_proj, order.ends)
    gated = experts.weighted_swiglu(both, top_k_weights, order)
    return experts.combine(_grouped_linear(gated, self.down_proj, order.ends), order).to(hidden_states.dtype)


def router(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores, weights and choices of a router of sigmoids with a bias and groups."""
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


def _has_powers_of_two(module: Any) -> bool:
    return all(size & (size - 1) == 0 for size in (module.num_experts, module.num_group))


# Settings that an operation is for, where a module may have others.
IS_FOR: dict[Forward, Callable[[Any], bool]] = {
    mlp: _is_swiglu,
    grouped_experts: _is_plain_experts,
    router: _has_powers_of_two,
}
