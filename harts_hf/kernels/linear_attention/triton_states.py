# ruff: noqa: ANN001, ANN202 -- Triton reads a kernel's annotations as its own types
# mypy: disallow-untyped-defs=False
"""The state recurrence over a chunk tree in Triton: the only sequential stage of chunkwise linear attention.

Per chunk node, with the incoming state S (K x V), keys k, and the WY factors w, u of the chunk (Yang et al., "Gated
Delta Networks", arXiv 2412.06464, section 3.3; KDA: arXiv 2510.26692)::

    v_new = u - w S                      S' = decay(S) + k^T v_new

One launch runs all chains of a round, a program a (chain, head, block of value columns); S stays in fp32 registers
along a chain and crosses from chain to chain through fp32 slots. In the backward the gradient of a slot is the sum
over the chains that start from it, in ascending order: no atomics, so two runs agree bitwise.

Casts are those of Flash Linear Attention's kernels, so that a tree reproduces their numerical path. The code runs
under Triton's interpreter (fp32 only: its bf16 products are wrong).
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
import triton.language as tl

from harts_hf.kernels.linear_attention.fla_tables import PackedChains


@triton.jit
def _states_forward(
    k,
    w,
    u,
    v_new,
    g,
    gk,
    h,
    slots,
    cu_seqlens,
    first_node,
    start_slot,
    node_slot,
    chains,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    USE_GK: tl.constexpr,
    WRITE_SLOTS: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    i_v, i_ch = pid % (V // BV), pid // (V // BV)
    i_h = i_ch % HV
    chain = tl.load(chains + i_ch // HV).to(tl.int64)
    begin = tl.load(cu_seqlens + chain)
    rows = (tl.load(cu_seqlens + chain + 1) - begin).to(tl.int32)
    node = tl.load(first_node + chain)
    slot = tl.load(start_slot + chain).to(tl.int64)

    # Offsets within a tile do not change along a chain; only the scalar bases advance.
    o_t, o_k, o_v = tl.arange(0, BT), tl.arange(0, BK), tl.arange(0, BV)
    o_kv = o_k[:, None] * V + o_v[None, :]
    o_tv = o_t[:, None] * (HV * V) + o_v[None, :]
    o_tk = o_t[:, None] * (HV * K) + o_k[None, :]
    o_kt = o_k[:, None] + o_t[None, :] * (H * K)
    k += (begin * H + i_h // (HV // H)) * K
    w += (begin * HV + i_h) * K
    u += (begin * HV + i_h) * V + i_v * BV
    v_new += (begin * HV + i_h) * V + i_v * BV
    h += (node * HV + i_h) * K * V + i_v * BV
    slots += i_h * K * V + i_v * BV
    node_slot += node
    m_k = o_k < K

    b_h = tl.load(slots + slot * (HV * K * V) + o_kv, mask=m_k[:, None] & (slot >= 0), other=0.0)
    # What a step needs of gates and slots is loaded a step ahead: these loads depend on nothing, and waiting for them
    # would cost as much as the products.
    if USE_GK:
        gk += (begin * HV + i_h) * K + o_k
        b_decay = tl.load(gk + (tl.minimum(rows, BT) - 1) * (HV * K), mask=m_k, other=0.0)
    else:
        g += begin * HV + i_h
        b_g = tl.load(g + o_t * HV, mask=o_t < rows, other=0.0)
        b_last = tl.load(g + (tl.minimum(rows, BT) - 1) * HV)
    if WRITE_SLOTS:
        slot = tl.load(node_slot).to(tl.int64)
    for _ in range((rows + BT - 1) // BT):
        m_t = o_t < rows
        tl.store(h + o_kv, b_h.to(h.dtype.element_ty), mask=m_k[:, None])
        b_w = tl.load(w + o_tk, mask=m_t[:, None] & m_k[None, :], other=0.0)
        b_v = tl.load(u + o_tv, mask=m_t[:, None], other=0.0) - tl.dot(b_w, b_h.to(b_w.dtype))
        tl.store(v_new + o_tv, b_v.to(v_new.dtype.element_ty), mask=m_t[:, None])
        rows_next = rows - BT
        last_next = BT + tl.minimum(rows_next, BT) - 1
        if USE_GK:
            b_h *= tl.exp2(b_decay)[:, None]
            b_decay = tl.load(gk + last_next * (HV * K), mask=m_k & (rows_next > 0), other=0.0)
            gk += BT * HV * K
        else:
            b_v *= tl.where(m_t, tl.exp2(b_last - b_g), 0.0)[:, None]
            b_h *= tl.exp2(b_last)
            b_g = tl.load(g + (BT + o_t) * HV, mask=o_t < rows_next, other=0.0)
            b_last = tl.load(g + last_next * HV, mask=rows_next > 0, other=0.0)
            g += BT * HV
        b_k = tl.load(k + o_kt, mask=m_k[:, None] & m_t[None, :], other=0.0)
        b_h = tl.dot(b_k, b_v.to(b_k.dtype), b_h)
        if WRITE_SLOTS:
            tl.store(slots + slot * (HV * K * V) + o_kv, b_h, mask=m_k[:, None] & (slot >= 0))
            node_slot += 1
            slot = tl.load(node_slot, mask=rows_next > 0, other=-1).to(tl.int64)
        rows = rows_next
        k += BT * H * K
        w += BT * HV * K
        u += BT * HV * V
        v_new += BT * HV * V
        h += HV * K * V


@triton.jit
def _states_backward(
    q,
    k,
    w,
    g,
    gk,
    do,
    dv,
    dv_new,
    dh,
    d_slots,
    d_start,
    cu_seqlens,
    first_node,
    start_slot,
    node_slot,
    chains,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    USE_GK: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    i_v, i_ch = pid % (V // BV), pid // (V // BV)
    i_h = i_ch % HV
    chain = tl.load(chains + i_ch // HV).to(tl.int64)
    begin, end = tl.load(cu_seqlens + chain), tl.load(cu_seqlens + chain + 1)
    steps = ((end - begin + BT - 1) // BT).to(tl.int32)
    first = begin + (steps - 1) * BT
    rows = (end - first).to(tl.int32)
    node = tl.load(first_node + chain) + steps - 1

    o_t, o_k, o_v = tl.arange(0, BT), tl.arange(0, BK), tl.arange(0, BV)
    o_kv = o_k[:, None] * V + o_v[None, :]
    o_tv = o_t[:, None] * (HV * V) + o_v[None, :]
    o_tk = o_t[:, None] * (H * K) + o_k[None, :]
    o_kt = o_k[:, None] + o_t[None, :] * (H * K)
    o_wt = o_k[:, None] + o_t[None, :] * (HV * K)
    q += (first * H + i_h // (HV // H)) * K
    k += (first * H + i_h // (HV // H)) * K
    w += (first * HV + i_h) * K
    do += (first * HV + i_h) * V + i_v * BV
    dv += (first * HV + i_h) * V + i_v * BV
    dv_new += (first * HV + i_h) * V + i_v * BV
    dh += (node * HV + i_h) * K * V + i_v * BV
    d_slots += i_h * K * V + i_v * BV
    node_slot += node
    m_k = o_k < K

    b_dh = tl.zeros([BK, BV], dtype=tl.float32)
    if USE_GK:
        gk += (first * HV + i_h) * K + o_k
        b_decay = tl.load(gk + (rows - 1) * (HV * K), mask=m_k, other=0.0)
    else:
        g += first * HV + i_h
        b_g = tl.load(g + o_t * HV, mask=o_t < rows, other=0.0)
        b_last = tl.load(g + (rows - 1) * HV)
    slot = tl.load(node_slot).to(tl.int64)
    for back in range(steps):
        m_t = (o_t < rows) | (back > 0)  # every node but a chain's last is full
        b_dh += tl.load(d_slots + slot * (HV * K * V) + o_kv, mask=m_k[:, None] & (slot >= 0), other=0.0)
        node_slot -= 1
        more = back + 1 < steps
        slot = tl.load(node_slot, mask=more, other=-1).to(tl.int64)
        tl.store(dh + o_kv, b_dh.to(dh.dtype.element_ty), mask=m_k[:, None])
        b_do = tl.load(do + o_tv, mask=m_t[:, None], other=0.0)
        b_k = tl.load(k + o_tk, mask=m_t[:, None] & m_k[None, :], other=0.0)
        b_dv = tl.dot(b_k, b_dh.to(b_k.dtype))
        b_q = tl.load(q + o_kt, mask=m_k[:, None] & m_t[None, :], other=0.0)
        if USE_GK:
            b_dh *= tl.exp2(b_decay)[:, None]
            gk -= BT * HV * K
            b_decay = tl.load(gk + (BT - 1) * (HV * K), mask=m_k & more, other=0.0)
        else:
            b_dv *= tl.where(m_t, tl.exp2(b_last - b_g), 0.0)[:, None]
            b_dh *= tl.exp2(b_last)
            b_q = b_q * tl.exp2(b_g)[None, :]  # stays fp32: this product alone runs in TF32, as in FLA
            g -= BT * HV
            b_g = tl.load(g + o_t * HV, mask=(o_t < BT) & more, other=0.0)
            b_last = tl.load(g + (BT - 1) * HV, mask=more, other=0.0)
        b_dv += tl.load(dv + o_tv, mask=m_t[:, None], other=0.0)
        tl.store(dv_new + o_tv, b_dv.to(dv_new.dtype.element_ty), mask=m_t[:, None])
        b_w = tl.load(w + o_wt, mask=m_k[:, None] & m_t[None, :], other=0.0)
        b_dh += tl.dot(b_q, b_do.to(b_q.dtype)) * scale - tl.dot(b_w, b_dv.to(b_w.dtype))
        q -= BT * H * K
        k -= BT * H * K
        w -= BT * HV * K
        do -= BT * HV * V
        dv -= BT * HV * V
        dv_new -= BT * HV * V
        dh -= HV * K * V
    start = tl.load(start_slot + chain)
    d_start += (chain * HV + i_h) * K * V + i_v * BV
    tl.store(d_start + o_kv, b_dh, mask=m_k[:, None] & (start >= 0))


@triton.jit
def _sum_children(d_slots, d_start, slot_ids, slot_ptr, slot_chains, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    slot = tl.load(slot_ids + tl.program_id(0)).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < SIZE
    total = tl.load(d_slots + slot * SIZE + offsets, mask=mask, other=0.0)
    begin, end = tl.load(slot_ptr + slot), tl.load(slot_ptr + slot + 1)
    for place in range(begin, end):
        chain = tl.load(slot_chains + place).to(tl.int64)
        total += tl.load(d_start + chain * SIZE + offsets, mask=mask, other=0.0)
    tl.store(d_slots + slot * SIZE + offsets, total, mask=mask)


@dataclass(frozen=True)
class LaunchConfig:
    """Block of value columns, warps and pipeline stages of a state kernel."""

    block_v: int
    num_warps: int
    num_stages: int


def default_config(value_heads: int) -> LaunchConfig:
    """The configuration by the number of value heads: few heads take narrow blocks, so that one chain fills the chip.

    It must not depend on the tree: a tree and its trajectories alone then take the same path.
    """
    return LaunchConfig(block_v=32 if value_heads >= 32 else 16, num_warps=4, num_stages=3)


def _block_v(config: LaunchConfig, dim_v: int) -> int:
    """The widest block of at most the configured width that divides the value dimension."""
    if dim_v % 16:
        raise ValueError(f"expected a value dimension that is a multiple of 16, got {dim_v}")
    return math.gcd(config.block_v, dim_v)


def run_states_forward(
    k: torch.Tensor,
    w: torch.Tensor,
    u: torch.Tensor,
    g: torch.Tensor,
    slots: torch.Tensor,
    chains: PackedChains,
    *,
    write_slots: bool,
    config: LaunchConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the recurrence over every chain.

    Args:
        k: ``[1, P, H, K]`` keys, already decayed to the chunk's end for KDA.
        w: ``[1, P, HV, K]`` and u: ``[1, P, HV, V]`` WY factors.
        g: cumulative log2 decay within each chunk, fp32: ``[1, P, HV]`` (GDN) or ``[1, P, HV, K]`` (KDA).
        slots: ``[S, HV, K, V]`` fp32; the first ``chains.num_initial`` hold the boundary states. Filled round by
            round if ``write_slots``; otherwise all of them must be filled already, and one launch does.
        chains: the packed tree.

    Returns:
        ``h`` ``[1, M, HV, K, V]``, the state before each node, and ``v_new`` ``[1, P, HV, V]``, in the dtype of k.
    """
    heads, dim_k, value_heads, dim_v = k.shape[2], k.shape[3], u.shape[2], u.shape[3]
    config = config or default_config(value_heads)
    block_v = _block_v(config, dim_v)
    h = k.new_empty(1, chains.num_nodes, value_heads, dim_k, dim_v)
    v_new = torch.empty_like(u)
    rounds = chains.round_ptr if write_slots else (0, chains.num_chains)
    for begin, end in pairwise(rounds):
        _states_forward[((end - begin) * value_heads * (dim_v // block_v),)](
            k,
            w,
            u,
            v_new,
            g,
            g,
            h,
            slots,
            chains.cu_seqlens,
            chains.first_node,
            chains.start_slot,
            chains.node_slot,
            chains.chains_by_round[begin:end],
            H=heads,
            HV=value_heads,
            K=dim_k,
            V=dim_v,
            BT=chains.chunk_size,
            BK=max(triton.next_power_of_2(dim_k), 16),
            BV=block_v,
            USE_GK=g.dim() == 4,
            WRITE_SLOTS=write_slots,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return h, v_new


def run_states_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    g: torch.Tensor,
    do: torch.Tensor,
    dv: torch.Tensor,
    d_slots: torch.Tensor,
    chains: PackedChains,
    *,
    scale: float,
    config: LaunchConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the recurrence's backward, last round first.

    Args:
        q, k, w, g: as in the forward; q is ``q * exp2(g)`` for KDA.
        do: ``[1, P, HV, V]`` gradient of the outputs.
        dv: ``[1, P, HV, V]`` gradient of ``v_new`` from within the chunk.
        d_slots: ``[S, HV, K, V]`` fp32 gradients of exported states, zero elsewhere; on return it also
            holds what came from the chains that start from each slot, which for a boundary state is its gradient.
        chains: the packed tree.
        scale: of q.

    Returns:
        ``dh`` ``[1, M, HV, K, V]``, gradient of the state after each node, and the whole gradient of ``v_new``.
    """
    heads, dim_k, value_heads, dim_v = k.shape[2], k.shape[3], do.shape[2], do.shape[3]
    config = config or default_config(value_heads)
    block_v = _block_v(config, dim_v)
    dh = k.new_empty(1, chains.num_nodes, value_heads, dim_k, dim_v)
    dv_new = torch.empty_like(dv)
    size = value_heads * dim_k * dim_v
    d_start = torch.empty(chains.num_chains if chains.num_slots else 0, size, dtype=torch.float32, device=k.device)
    for index in range(chains.num_rounds - 1, -1, -1):
        begin, end = chains.round_ptr[index : index + 2]
        _states_backward[((end - begin) * value_heads * (dim_v // block_v),)](
            q,
            k,
            w,
            g,
            g,
            do,
            dv,
            dv_new,
            dh,
            d_slots,
            d_start,
            chains.cu_seqlens,
            chains.first_node,
            chains.start_slot,
            chains.node_slot,
            chains.chains_by_round[begin:end],
            scale,
            H=heads,
            HV=value_heads,
            K=dim_k,
            V=dim_v,
            BT=chains.chunk_size,
            BK=max(triton.next_power_of_2(dim_k), 16),
            BV=block_v,
            USE_GK=g.dim() == 4,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        first, last = chains.slot_round_ptr[index : index + 2]
        if last > first:
            block = min(1024, triton.next_power_of_2(size))
            _sum_children[(last - first, triton.cdiv(size, block))](
                d_slots,
                d_start,
                chains.slots_by_round[first:last],
                chains.slot_ptr,
                chains.slot_chains,
                SIZE=size,
                BLOCK=block,
            )
    return dh, dv_new
