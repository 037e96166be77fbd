"""Flash Linear Attention's stage functions written out in PyTorch, so that what calls them runs without a GPU.

Shapes and names are FLA's (0.6); how a gradient is split between two stages is this file's own business, as long as
the stages together give all of it. Gates are log2, as there.
"""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

RCP_LN2 = 1.4426950216293335


def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts the stages where ``fla`` would be and returns our module that calls them, imported for this test only."""
    places = {
        "fla.backends": {"_operation_registries": {}, "_function_registries": {}},
        "fla.ops.common.chunk_o": {
            "chunk_fwd_o": chunk_fwd_o, "chunk_bwd_dv_local": chunk_bwd_dv_local, "chunk_bwd_dqkwg": chunk_bwd_dqkwg,
        },
        "fla.ops.gated_delta_rule.chunk_fwd": {"chunk_gated_delta_rule_fwd_intra": gated_intra},
        "fla.ops.gated_delta_rule.wy_fast": {
            "recompute_w_u_fwd": gated_w_u, "prepare_wy_repr_bwd": prepare_wy_repr_bwd,
        },
        "fla.ops.gla.chunk": {"chunk_gla_fwd_o_gk": chunk_gla_fwd_o_gk},
        "fla.ops.kda.chunk_bwd": {
            "chunk_kda_bwd_dAv": chunk_kda_bwd_dAv, "chunk_kda_bwd_wy_dqkg_fused": chunk_kda_bwd_wy_dqkg_fused,
        },
        "fla.ops.kda.chunk_intra": {
            "chunk_kda_fwd_intra": chunk_kda_fwd_intra, "chunk_kda_bwd_intra": chunk_kda_bwd_intra,
        },
        "fla.ops.kda.wy_fast": {"recompute_w_u_fwd": kimi_w_u},
        "fla.ops.utils": {"chunk_local_cumsum": chunk_local_cumsum},
        "fla.ops.utils.constant": {"RCP_LN2": RCP_LN2},
    }  # fmt: skip
    for name, content in places.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            if path not in places and depth < len(parts):
                monkeypatch.setitem(sys.modules, path, ModuleType(path))
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["fla"].backends = sys.modules["fla.backends"]
    monkeypatch.setattr("harts_hf.kernels.gpu_versions.require_linear_attention", lambda: None)
    monkeypatch.delitem(sys.modules, "harts_hf.kernels.linear_attention.fla", raising=False)
    import importlib

    ours = importlib.import_module("harts_hf.kernels.linear_attention.fla")
    monkeypatch.delitem(sys.modules, "harts_hf.kernels.linear_attention.fla")
    return ours


class Rows:
    """The nodes of a call as slices, and tensors per node with the value heads' keys and channel-wise gates."""

    def __init__(self, cu_seqlens: torch.Tensor, chunk_indices: torch.Tensor, size: int) -> None:
        ends = cu_seqlens.tolist()
        begins = [(ends[chain] + step * size, ends[chain + 1]) for chain, step in chunk_indices.tolist()]
        self.nodes = [slice(begin, min(begin + size, end)) for begin, end in begins]


def heads_like(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.repeat_interleave(count // x.shape[1], 1)


def channels(g: torch.Tensor, dim: int) -> torch.Tensor:
    return g if g.dim() == 3 else g[..., None].expand(*g.shape, dim)


def products(left: torch.Tensor, right: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """``[HV, T, T]``: entry (i, j) is the sum over channels of ``left_i exp2(g_i - g_j) right_j``, 0 above j > i."""
    left, right, g = heads_like(left, g.shape[1]), heads_like(right, g.shape[1]), channels(g, left.shape[2])
    past = torch.ones(len(left), len(left), dtype=torch.bool).tril()[..., None, None]
    decay = torch.where(past, g[:, None] - g[None], -torch.inf).exp2()
    return torch.einsum("ihk,jhk,ijhk->hij", left, right, decay)


def solved_of(k: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    lower = (products(k, k, g) * beta.T[..., None]).tril(-1)
    return torch.linalg.inv(torch.eye(len(k)) + lower)


def w_u_of(k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, solved: torch.Tensor) -> Any:
    k, g = heads_like(k, v.shape[1]), channels(g, k.shape[2])
    return tuple(torch.einsum("hij,jhd->ihd", solved, x * beta[..., None]) for x in (k * g.exp2(), v))


def inter_of(q: torch.Tensor, g: torch.Tensor, h: torch.Tensor, scale: float) -> torch.Tensor:
    q = heads_like(q, h.shape[0])
    return scale * torch.einsum("thk,hkv->thv", q * channels(g, q.shape[2]).exp2(), h)


def next_of(k: torch.Tensor, g: torch.Tensor, h: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    k, g = heads_like(k, h.shape[0]), channels(g, k.shape[2])
    return h * g[-1].exp2()[..., None] + torch.einsum("thk,thv->hkv", k * (g[-1] - g).exp2(), v)


def apply(scores: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.einsum("hij,jhv->ihv", scores, v)


def as_rows(matrix: torch.Tensor, size: int) -> torch.Tensor:
    """``[HV, T, T]`` as FLA keeps it: ``[T, HV, C]``."""
    return torch.nn.functional.pad(matrix.transpose(0, 1), (0, size - matrix.shape[2]))


def as_matrix(rows: torch.Tensor) -> torch.Tensor:
    return rows.transpose(0, 1)[..., : len(rows)]


def by_node(rows: Rows, run: Any) -> tuple[torch.Tensor, ...]:
    """Results of ``run(number, slice)`` of all nodes, joined along rows."""
    parts = [run(number, node) for number, node in enumerate(rows.nodes)]
    order = sorted(range(len(parts)), key=lambda number: rows.nodes[number].start)
    return tuple(torch.cat([column[number] for number in order])[None] for column in zip(*parts, strict=True))


def gradients(loss: Any, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.enable_grad():
        leaves = tuple(leaf.detach().requires_grad_() for leaf in leaves)
        found = torch.autograd.grad(loss(*leaves), leaves, allow_unused=True)
    return tuple(torch.zeros_like(x) if d is None else d for x, d in zip(leaves, found, strict=True))


def chunk_local_cumsum(g, chunk_size, cu_seqlens, chunk_indices, scale=1.0, reverse=False):
    def run(_, node):
        part = g[0, node] * scale
        return ((part.flip(0).cumsum(0).flip(0) if reverse else part.cumsum(0)),)

    return by_node(Rows(cu_seqlens, chunk_indices, chunk_size), run)[0]


def gated_intra(k, v, g, beta, chunk_size, cu_seqlens, chunk_indices):
    def run(_, n):
        solved = solved_of(k[0, n], g[0, n], beta[0, n])
        return *w_u_of(k[0, n], v[0, n], g[0, n], beta[0, n], solved), as_rows(solved, chunk_size)

    return by_node(Rows(cu_seqlens, chunk_indices, chunk_size), run)


def gated_w_u(k, v, beta, A, g, cu_seqlens, chunk_indices):
    def run(_, n):
        return w_u_of(k[0, n], v[0, n], g[0, n], beta[0, n], as_matrix(A[0, n]))

    return by_node(Rows(cu_seqlens, chunk_indices, A.shape[-1]), run)


def chunk_fwd_o(q, k, v, h, g, scale, chunk_size, cu_seqlens, chunk_indices):
    def run(m, n):
        scores = scale * products(q[0, n], k[0, n], g[0, n])
        return (inter_of(q[0, n], g[0, n], h[0, m], scale) + apply(scores, v[0, n]),)

    return by_node(Rows(cu_seqlens, chunk_indices, chunk_size), run)[0]


def chunk_bwd_dv_local(q, k, g, do, scale, chunk_size, cu_seqlens, chunk_indices):
    def run(_, n):
        return (apply(scale * products(q[0, n], k[0, n], g[0, n]).transpose(1, 2), do[0, n]),)

    return by_node(Rows(cu_seqlens, chunk_indices, chunk_size), run)[0]


def chunk_bwd_dqkwg(q, k, v, w, g, h, dv, do, dh, scale, chunk_size, cu_seqlens, chunk_indices):
    def run(m, n):
        def loss(q_n, k_n, g_n):
            out = inter_of(q_n, g_n, h[0, m], scale) + apply(scale * products(q_n, k_n, g_n), v[0, n])
            return (out * do[0, n]).sum() + (next_of(k_n, g_n, h[0, m], v[0, n]) * dh[0, m]).sum()

        dq, dk, dg = gradients(loss, q[0, n], k[0, n], g[0, n])
        return dq, dk, -torch.einsum("thv,hkv->thk", dv[0, n], h[0, m]), dg * RCP_LN2

    return by_node(Rows(cu_seqlens, chunk_indices, chunk_size), run)


def prepare_wy_repr_bwd(k, v, beta, g, A, dw, du, cu_seqlens, chunk_indices):
    def run(_, n):
        def loss(k_n, v_n, b_n, g_n):
            w, u = w_u_of(k_n, v_n, g_n, b_n, solved_of(k_n, g_n, b_n))
            return (w * dw[0, n]).sum() + (u * du[0, n]).sum()

        dk, dv, db, dg = gradients(loss, k[0, n], v[0, n], beta[0, n], g[0, n])
        return dk, dv, db, dg * RCP_LN2

    return by_node(Rows(cu_seqlens, chunk_indices, A.shape[-1]), run)


def chunk_kda_fwd_intra(q, k, v, gk, beta, scale, chunk_size, cu_seqlens, chunk_indices):
    def run(_, n):
        solved = solved_of(k[0, n], gk[0, n], beta[0, n])
        kg = k[0, n] * (gk[0, n][-1] - gk[0, n]).exp2()
        scores = scale * products(q[0, n], k[0, n], gk[0, n])
        w, u = w_u_of(k[0, n], v[0, n], gk[0, n], beta[0, n], solved)
        return w, u, kg, as_rows(scores, chunk_size), as_rows(solved, chunk_size)

    w, u, kg, scores, solved = by_node(Rows(cu_seqlens, chunk_indices, chunk_size), run)
    return w, u, None, kg, scores, solved


def kimi_w_u(q, k, v, beta, A, gk, cu_seqlens, chunk_indices):
    def run(_, n):
        w, u = w_u_of(k[0, n], v[0, n], gk[0, n], beta[0, n], as_matrix(A[0, n]))
        return w, u, q[0, n] * gk[0, n].exp2(), k[0, n] * (gk[0, n][-1] - gk[0, n]).exp2()

    return by_node(Rows(cu_seqlens, chunk_indices, A.shape[-1]), run)


def chunk_gla_fwd_o_gk(q, v, g, A, h, scale, chunk_size, cu_seqlens, chunk_indices):
    def run(m, n):
        return (inter_of(q[0, n], g[0, n], h[0, m], scale) + apply(as_matrix(A[0, n]), v[0, n]),)

    return by_node(Rows(cu_seqlens, chunk_indices, chunk_size), run)[0]


def chunk_kda_bwd_dAv(q, k, v, do, A, scale, chunk_size, cu_seqlens, chunk_indices):
    def run(_, n):
        d_scores = scale * torch.einsum("ihv,jhv->hij", do[0, n], v[0, n])
        return as_rows(d_scores, chunk_size), apply(as_matrix(A[0, n]).transpose(1, 2), do[0, n])

    return by_node(Rows(cu_seqlens, chunk_indices, chunk_size), run)


def chunk_kda_bwd_wy_dqkg_fused(
    q, k, v, v_new, g, beta, A, h, do, dh, dv, scale, chunk_size, cu_seqlens, chunk_indices
):
    def run(m, n):
        dw = -torch.einsum("thv,hkv->thk", dv[0, n], h[0, m])

        def loss(q_n, k_n, v_n, b_n, g_n, solved):
            w, u = w_u_of(k_n, v_n, g_n, b_n, solved)
            states = (inter_of(q_n, g_n, h[0, m], scale) * do[0, n]).sum()
            states = states + (next_of(k_n, g_n, h[0, m], v_new[0, n]) * dh[0, m]).sum()
            return states + (w * dw).sum() + (u * dv[0, n]).sum()

        solved = as_matrix(A[0, n])
        dq, dk, dv_n, db, dg, d_solved = gradients(loss, q[0, n], k[0, n], v[0, n], beta[0, n], g[0, n], solved)
        return dq, dk, dv_n, db, dg * RCP_LN2, as_rows(d_solved, chunk_size)

    return by_node(Rows(cu_seqlens, chunk_indices, chunk_size), run)


def chunk_kda_bwd_intra(q, k, g, beta, dAqk, dAkk, dq, dk, db, dg, chunk_size, cu_seqlens, chunk_indices):
    def run(_, n):
        def loss(q_n, k_n, g_n, b_n):
            scores = products(q_n, k_n, g_n)  # dAqk holds the scale
            return (scores * as_matrix(dAqk[0, n])).sum() + (solved_of(k_n, g_n, b_n) * as_matrix(dAkk[0, n])).sum()

        d_q, d_k, d_g, d_b = gradients(loss, q[0, n], k[0, n], g[0, n], beta[0, n])
        return d_q + dq[0, n], d_k + dk[0, n], d_b + db[0, n], d_g * RCP_LN2 + dg[0, n]

    return by_node(Rows(cu_seqlens, chunk_indices, chunk_size), run)
