"""The delta rules token by token in fp64, on the compact tree, depth by depth: no chunks, no replay, no kernels."""

import numpy as np
import torch
from torch.nn import functional as F

from benchmarks.gpu.linear.layers import Mixer
from benchmarks.gpu.trees import Forest


def oracle_mixer(forest: Forest, device: str = "cuda") -> Mixer:
    """Convolution and rules for a layer in fp64."""
    ancestors = torch.from_numpy(forest.ancestors(4).T.copy()).to(device)

    def conv(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        padded = torch.cat([x, x.new_zeros(1, x.shape[1])])
        return F.silu(sum(padded[rows] * weight[:, tap] for tap, rows in enumerate(ancestors)))

    def rule(*rows: torch.Tensor) -> torch.Tensor:
        return recurrent_rule(*rows, forest)

    return Mixer(conv=conv, gated=rule, kimi=rule)


def recurrent_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, forest: Forest
) -> torch.Tensor:
    """Both rules by the shape of ``g``: ``[N, HV]`` or ``[N, HV, K]``; q and k are normalised here."""
    group = v.shape[1] // q.shape[1]
    q, k = (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q.repeat_interleave(group, 1) * q.shape[-1] ** -0.5
    k = k.repeat_interleave(group, 1)
    decay = g.exp()[..., None] if g.dim() == 3 else g.exp()[..., None, None]
    order = np.argsort(forest.depth, kind="stable")
    bounds = np.searchsorted(forest.depth[order], np.arange(forest.depth.max() + 2))
    position = np.empty(forest.num_rows, np.int64)
    outputs = []
    state = q.new_zeros(1, v.shape[1], k.shape[2], v.shape[2])
    for depth in range(len(bounds) - 1):
        rows = order[bounds[depth] : bounds[depth + 1]]
        position[rows] = np.arange(len(rows))
        above = np.zeros(len(rows), np.int64) if depth == 0 else position[forest.parent[rows]]
        index = torch.from_numpy(rows).to(q.device)
        state = state[torch.from_numpy(above).to(q.device)] * decay[index]
        k_d, v_d = k[index], v[index]
        read = torch.einsum("nhk,nhkv->nhv", k_d, state)
        update = (v_d - read) * beta[index][..., None]
        state = state + k_d[..., None] * update[..., None, :]
        outputs.append(torch.einsum("nhk,nhkv->nhv", q[index], state))
    back = torch.from_numpy(np.argsort(order, kind="stable")).to(q.device)
    return torch.cat(outputs)[back]
