"""Linear-attention layers, projections to output, whose convolution and rule can be exchanged.

The modules follow Transformers' Qwen3.5 (GDN), Kimi Linear (KDA, 32 heads) and Bailing hybrid (KDA, 16 heads:
Ling-tiny) step by step; the tree and the expanded baseline share everything but convolution and rule.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.gpu.registry import LINEAR_KINDS, LinearKind
from benchmarks.gpu.trees import Forest
from harts_hf.kernels.conv import tree_causal_conv1d
from harts_hf.kernels.linear_attention import tree_gated_delta_rule, tree_kimi_delta_rule


@dataclass(frozen=True)
class Mixer:
    """``conv(x [T, D], weight [D, W]) -> [T, D]``, and the two rules on ``[T, heads, dim]``."""

    conv: Callable[..., torch.Tensor]
    gated: Callable[..., torch.Tensor]
    kimi: Callable[..., torch.Tensor]


def tree_mixer(forest: Forest) -> Mixer:
    """Ours."""
    linear, conv = forest.linear_tables().to("cuda"), forest.conv_table(4).to("cuda")
    return Mixer(
        conv=lambda x, weight: tree_causal_conv1d(x, weight, None, conv, activation="silu"),
        gated=lambda *rows: tree_gated_delta_rule(*rows, linear).output,
        kimi=lambda *rows: tree_kimi_delta_rule(*rows, linear).output,
    )


def expanded_mixer(cu_seqlens: torch.Tensor) -> Mixer:
    """Stock FLA on packed trajectories, its Triton convolution too."""
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    host = cu_seqlens.cpu()

    def conv(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return causal_conv1d(x[None], weight, activation="silu", cu_seqlens=cu_seqlens, cu_seqlens_cpu=host)[0][0]

    def run(rule: Callable[..., Any], *rows: torch.Tensor) -> torch.Tensor:
        batched = [x[None] for x in rows]
        return rule(*batched, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens, cu_seqlens_cpu=host)[0][0]

    return Mixer(
        conv=conv,
        gated=lambda *rows: run(chunk_gated_delta_rule, *rows),
        kimi=lambda *rows: run(chunk_kda, *rows),
    )


class RMSNormGated(nn.Module):
    """RMSNorm, weight, then a gate, in fp32; by FLA's fused kernel, as Transformers takes it, unless switched off."""

    def __init__(self, dim: int, gate: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(dim))
        self.gate, self.fused = gate, True

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        if self.fused:
            from fla.modules.fused_norm_gate import rms_norm_gated

            return rms_norm_gated(x, z, self.weight, None, activation=self.gate, eps=1e-6)
        wide = torch.promote_types(x.dtype, torch.float32)
        y, z = x.to(wide), z.to(wide)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight.to(wide)
        return (y * (F.silu(z) if self.gate == "swish" else torch.sigmoid(z))).to(x.dtype)


class LinearLayer(nn.Module):
    """What both kinds share: q, k, v projection, convolution, output norm and projection.

    A kind adds ``gates(x)``: g, beta, z.
    """

    def __init__(self, kind: LinearKind) -> None:
        super().__init__()
        self.kimi, self.low_rank = kind.kimi, kind.low_rank
        self.heads, self.value_heads, self.dim = kind.heads, kind.value_heads, kind.dim
        channels = (2 * kind.heads + kind.value_heads) * kind.dim
        self.in_proj_qkv = nn.Linear(kind.hidden, channels, bias=False)
        self.conv_weight = nn.Parameter(torch.randn(channels, 4) * 0.5)
        self.in_proj_b = nn.Linear(kind.hidden, kind.value_heads, bias=False)
        self.norm = RMSNormGated(kind.dim, "sigmoid" if kind.kimi else "swish")
        self.out_proj = nn.Linear(kind.value_heads * kind.dim, kind.hidden, bias=False)

    def qkv(self, x: torch.Tensor, mixer: Mixer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.split(mixer.conv(self.in_proj_qkv(x), self.conv_weight))

    def split(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        keys = self.heads * self.dim
        q, k, v = mixed.split([keys, keys, self.value_heads * self.dim], dim=-1)
        return q.unflatten(-1, (-1, self.dim)), k.unflatten(-1, (-1, self.dim)), v.unflatten(-1, (-1, self.dim))

    def rule(self, mixer: Mixer) -> Callable[..., torch.Tensor]:
        return mixer.kimi if self.kimi else mixer.gated

    def forward(self, x: torch.Tensor, mixer: Mixer) -> torch.Tensor:
        g, beta, z = self.gates(x)
        o = self.rule(mixer)(*self.qkv(x, mixer), g, beta)
        return self.out_proj(self.norm(o, z).flatten(1))


class GatedDeltaNet(LinearLayer):
    """Qwen3.5's layer."""

    def __init__(self, kind: LinearKind) -> None:
        super().__init__(kind)
        self.in_proj_z = nn.Linear(kind.hidden, kind.value_heads * kind.dim, bias=False)
        self.in_proj_a = nn.Linear(kind.hidden, kind.value_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(kind.value_heads).uniform_(0.1, 16).log())
        self.dt_bias = nn.Parameter(torch.randn(kind.value_heads) * 0.5 - 3)

    def gates(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = self.A_log.dtype
        g = -self.A_log.exp() * F.softplus(self.in_proj_a(x).to(wide) + self.dt_bias)
        return g, self.in_proj_b(x).sigmoid(), self.in_proj_z(x).unflatten(-1, (-1, self.dim))


class KimiDeltaAttention(LinearLayer):
    """Kimi Linear's layer (``low_rank``: softplus gate) or Bailing's (full rank, gate bounded by -5)."""

    def __init__(self, kind: LinearKind) -> None:
        super().__init__(kind)
        width = kind.heads * kind.dim

        def projection() -> nn.Module:
            if not kind.low_rank:
                return nn.Linear(kind.hidden, width, bias=False)
            narrow = nn.Linear(kind.hidden, kind.dim, bias=False)
            return nn.Sequential(narrow, nn.Linear(kind.dim, width, bias=False))

        self.f_proj, self.g_proj = projection(), projection()
        self.A_log = nn.Parameter(torch.empty(kind.heads).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(torch.randn(width) * 0.5 - 3)

    def gates(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = self.A_log.dtype
        raw = (self.f_proj(x).to(wide) + self.dt_bias).unflatten(-1, (-1, self.dim))
        scale = self.A_log.exp()[:, None]
        g = -scale * F.softplus(raw) if self.low_rank else -5.0 * torch.sigmoid(scale * raw)
        return g, self.in_proj_b(x).to(wide).sigmoid(), self.g_proj(x).unflatten(-1, (-1, self.dim))


def pin_norm() -> None:
    """One launch configuration for FLA's gated norm, which else tunes and compiles anew for every number of rows."""
    import triton
    from fla.modules.norm import fused_norm_gate

    for name, rows, warps in (("fwd", 32, 4), ("bwd", 64, 16)):
        kernel = getattr(fused_norm_gate, f"layer_norm_gated_{name}_kernel")
        while not isinstance(kernel, triton.runtime.Autotuner):
            kernel = kernel.fn
        kernel.configs = [triton.Config({"BT": rows}, num_warps=warps)]


def make_layer(name: str, *, seed: int = 0, small: bool = False, device: str = "cuda") -> LinearLayer:
    """A kind of the registry, bf16 with fp32 gate parameters; ``small`` for parity checks."""
    torch.manual_seed(seed)
    kind = LINEAR_KINDS[name].small if small else LINEAR_KINDS[name]
    layer = (KimiDeltaAttention if kind.kimi else GatedDeltaNet)(kind).to(device)
    for name, parameter in layer.named_parameters():
        if name not in ("A_log", "dt_bias"):
            parameter.data = parameter.data.to(torch.bfloat16)
    return layer
