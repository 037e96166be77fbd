# ruff: noqa: ANN001, ANN202 -- Triton reads a kernel's annotations as its own types
# mypy: disallow-untyped-defs=False
"""Rows into chunk order and their gradients back, in Triton, with the L2 norm of q and k on the way.

One launch gathers q, k, v, g and beta of every position (and does what stock layers need a ``contiguous()`` for); one
launch sums each row's positions in ascending order, in fp32, and takes the gradient of the norm once per row.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from harts_hf.kernels.linear_attention.fla_tables import PackedChains

NORM_EPS = 1e-6


def pack_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chains: PackedChains,
    *,
    norm: bool,
) -> tuple[torch.Tensor, ...]:
    """q, k (normalised if ``norm``), v, g, beta of every position, ``[1, P, ...]``; rstd of q and k, ``[P, H]``."""
    rows = [_row_contiguous(tensor) for tensor in (q, k, v, g, beta)]
    positions = chains.num_positions
    packed = [torch.empty(1, positions, *x.shape[1:], dtype=x.dtype, device=x.device) for x in rows]
    heads = q.shape[1]
    rstd = torch.empty(2, positions, heads, dtype=torch.float32, device=q.device)
    _pack[(positions,)](
        *rows,
        *packed,
        rstd[0],
        rstd[1],
        chains.gather.index,
        *[x.stride(0) for x in rows],
        NORM_EPS,
        **_sizes(rows),
        NORM=norm,
        num_warps=8,
    )
    return *packed, rstd[0], rstd[1]


def unpack_gradients(
    gradients: Sequence[torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    q_rstd: torch.Tensor,
    k_rstd: torch.Tensor,
    chains: PackedChains,
    dtypes: tuple[torch.dtype, ...],
    *,
    norm: bool,
) -> list[torch.Tensor]:
    """Gradients ``[E + N, ...]`` of q, k, v, g, beta in ``dtypes`` from those of the positions.

    Args:
        gradients: five, ``[1, P, ...]``, of packed q, k (as normalised), v, g, beta.
        q, k: ``[1, P, H, K]`` the packed (normalised) values.
        q_rstd, k_rstd: ``[P, H]``.
        chains: the packed tree.
        dtypes: of the five results.
        norm: whether q and k were normalised.
    """
    positions = [x.squeeze(0).contiguous() for x in gradients]
    num_rows = chains.gather.num_rows
    rows = [
        torch.empty(num_rows, *x.shape[1:], dtype=dtype, device=x.device)
        for x, dtype in zip(positions, dtypes, strict=True)
    ]
    _unpack[(num_rows,)](
        *positions,
        *rows,
        q,
        k,
        q_rstd,
        k_rstd,
        chains.gather.ptr,
        chains.gather.positions,
        chains.starts_from_nothing,
        **_sizes(rows),
        NORM=norm,
        num_warps=8,
    )
    return rows


def _row_contiguous(x: torch.Tensor) -> torch.Tensor:
    """``x`` itself if each of its rows is contiguous (rows may lie apart), else a copy."""
    return x if x[:1].is_contiguous() else x.contiguous()


def _sizes(rows: list[torch.Tensor]) -> dict[str, int]:
    heads, dim = rows[0].shape[1:]
    size_v, size_g, size_b = (x[0].numel() if len(x) else 1 for x in rows[2:])
    power = triton.next_power_of_2
    return {
        "H": heads,
        "K": dim,
        "V": size_v,
        "G": size_g,
        "B": size_b,
        "BH": power(heads),
        "BK": power(dim),
        "BV": power(size_v),
        "BG": power(size_g),
        "BB": power(size_b),
    }


@triton.jit
def _pack(
    q,
    k,
    v,
    g,
    b,
    q_out,
    k_out,
    v_out,
    g_out,
    b_out,
    q_rstd,
    k_rstd,
    index,
    stride_q,
    stride_k,
    stride_v,
    stride_g,
    stride_b,
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    G: tl.constexpr,
    B: tl.constexpr,
    BH: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BG: tl.constexpr,
    BB: tl.constexpr,
    NORM: tl.constexpr,
):
    position = tl.program_id(0).to(tl.int64)
    row = tl.load(index + position)
    o_h, o_k = tl.arange(0, BH), tl.arange(0, BK)
    o_hk = o_h[:, None] * K + o_k[None, :]
    m_hk = (o_h < H)[:, None] & (o_k < K)[None, :]
    _pack_norm(q + row * stride_q, q_out + position * H * K, q_rstd + position * H, eps, o_h, o_hk, m_hk, H, NORM)
    _pack_norm(k + row * stride_k, k_out + position * H * K, k_rstd + position * H, eps, o_h, o_hk, m_hk, H, NORM)
    _copy(v + row * stride_v, v_out + position * V, V, BV)
    _copy(g + row * stride_g, g_out + position * G, G, BG)
    _copy(b + row * stride_b, b_out + position * B, B, BB)


@triton.jit
def _pack_norm(source, target, rstd, eps, o_h, o_hk, m_hk, H: tl.constexpr, NORM: tl.constexpr):
    value = tl.load(source + o_hk, mask=m_hk, other=0.0)
    if NORM:
        wide = value.to(tl.float32)
        inverse = 1 / tl.sqrt(tl.sum(wide * wide, 1) + eps)
        tl.store(rstd + o_h, inverse, mask=o_h < H)
        value = (wide * inverse[:, None]).to(target.dtype.element_ty)
    tl.store(target + o_hk, value, mask=m_hk)


@triton.jit
def _copy(source, target, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(target + offsets, tl.load(source + offsets, mask=offsets < SIZE, other=0.0), mask=offsets < SIZE)


@triton.jit
def _unpack(
    dq,
    dk,
    dv,
    dg,
    db,
    q_out,
    k_out,
    v_out,
    g_out,
    b_out,
    q,
    k,
    q_rstd,
    k_rstd,
    ptr,
    positions,
    starts_from_nothing,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    G: tl.constexpr,
    B: tl.constexpr,
    BH: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BG: tl.constexpr,
    BB: tl.constexpr,
    NORM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(ptr + row), tl.load(ptr + row + 1)
    o_h, o_k = tl.arange(0, BH), tl.arange(0, BK)
    o_hk = o_h[:, None] * K + o_k[None, :]
    m_hk = (o_h < H)[:, None] & (o_k < K)[None, :]
    o_v, o_g, o_b = tl.arange(0, BV), tl.arange(0, BG), tl.arange(0, BB)
    sum_q = tl.zeros([BH, BK], dtype=tl.float32)
    sum_k = tl.zeros([BH, BK], dtype=tl.float32)
    sum_v = tl.zeros([BV], dtype=tl.float32)
    sum_g = tl.zeros([BG], dtype=tl.float32)
    sum_b = tl.zeros([BB], dtype=tl.float32)
    for entry in range(begin, end):
        position = tl.load(positions + entry)
        sum_q += tl.load(dq + position * H * K + o_hk, mask=m_hk, other=0.0).to(tl.float32)
        sum_k += tl.load(dk + position * H * K + o_hk, mask=m_hk, other=0.0).to(tl.float32)
        sum_v += tl.load(dv + position * V + o_v, mask=o_v < V, other=0.0).to(tl.float32)
        sum_g += tl.load(dg + position * G + o_g, mask=o_g < G, other=0.0).to(tl.float32)
        sum_b += tl.load(db + position * B + o_b, mask=o_b < B, other=0.0).to(tl.float32)
    if NORM:
        m_first = m_hk & (end > begin)
        first = tl.load(positions + begin, mask=end > begin, other=0)
        sum_q = _norm_gradient(sum_q, q + first * H * K, q_rstd + first * H, o_h, o_hk, m_first, H)
        sum_k = _norm_gradient(sum_k, k + first * H * K, k_rstd + first * H, o_h, o_hk, m_first, H)
    sum_g = tl.where(tl.load(starts_from_nothing + row) == 0, sum_g, 0.0)
    tl.store(q_out + row * H * K + o_hk, sum_q.to(q_out.dtype.element_ty), mask=m_hk)
    tl.store(k_out + row * H * K + o_hk, sum_k.to(k_out.dtype.element_ty), mask=m_hk)
    tl.store(v_out + row * V + o_v, sum_v.to(v_out.dtype.element_ty), mask=o_v < V)
    tl.store(g_out + row * G + o_g, sum_g.to(g_out.dtype.element_ty), mask=o_g < G)
    tl.store(b_out + row * B + o_b, sum_b.to(b_out.dtype.element_ty), mask=o_b < B)


@triton.jit
def _norm_gradient(gradient, value, rstd, o_h, o_hk, mask, H: tl.constexpr):
    normed = tl.load(value + o_hk, mask=mask, other=0.0).to(tl.float32)
    inverse = tl.load(rstd + o_h, mask=o_h < H, other=0.0)[:, None]
    return (gradient - tl.sum(gradient * normed, 1)[:, None] * normed) * inverse
