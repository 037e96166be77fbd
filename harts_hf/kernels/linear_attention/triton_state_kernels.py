# ruff: noqa: ANN001, ANN201 -- Triton reads a kernel's annotations as its own types
# mypy: disallow-untyped-defs=False
"""The state recurrence over a chunk tree in Triton: the only sequential stage of chunkwise linear attention.

Per chunk node, with the incoming state S (K x V), keys k, and the WY factors w, u of the chunk (Yang et al., "Gated
Delta Networks", arXiv 2412.06464, section 3.3; KDA: arXiv 2510.26692)::

    v_new = u - w S                      S' = decay(S) + k^T v_new

One launch runs all chains of a round, a program a (chain, head, block of value columns); S stays in fp32 registers
along a chain and crosses from chain to chain through fp32 slots. In the backward the gradient of a slot is the sum
over the chains that start from it, in descending order: no atomics, so two runs agree bitwise.

Casts are those of Flash Linear Attention's kernels, so that a tree reproduces their numerical path. The code runs
under Triton's interpreter (fp32 only: its bf16 products are wrong).
"""

import triton
import triton.language as tl

# Chains and slots of a round are slices, aligned or not: Triton would compile everything twice for that.
_SLICES = ["chains", "slot_ids"]


@triton.jit(do_not_specialize_on_alignment=_SLICES)
def states_forward(
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
    begin, end = tl.load(cu_seqlens + chain), tl.load(cu_seqlens + chain + 1)
    node = tl.load(first_node + chain)
    slot = tl.load(start_slot + chain).to(tl.int64)

    o_r, o_v = tl.arange(0, BT), i_v * BV + tl.arange(0, BV)
    o_a, o_b = tl.arange(0, BK), BK + tl.arange(0, BK)
    m_a, m_b = o_a < K, o_b < K
    o_av, o_bv = o_a[:, None] * V + o_v[None, :], o_b[:, None] * V + o_v[None, :]
    k += (i_h // (HV // H)) * K
    w += i_h * K
    u += i_h * V
    v_new += i_h * V
    h += i_h * K * V
    slots += i_h * K * V

    b_ha = tl.load(slots + slot * (HV * K * V) + o_av, mask=m_a[:, None] & (slot >= 0), other=0.0)
    if K > BK:
        b_hb = tl.load(slots + slot * (HV * K * V) + o_bv, mask=m_b[:, None] & (slot >= 0), other=0.0)
    if WRITE_SLOTS:
        slot = tl.load(node_slot + node).to(tl.int64)
    for step in range(tl.cdiv(end - begin, BT)):
        o_t = begin + step * BT + o_r
        m_t = o_t < end
        o_tv = o_t[:, None] * (HV * V) + o_v[None, :]
        p_h = h + (node + step) * (HV * K * V)
        tl.store(p_h + o_av, b_ha.to(h.dtype.element_ty), mask=m_a[:, None])
        b_w = tl.load(w + o_t[:, None] * (HV * K) + o_a[None, :], mask=m_t[:, None] & m_a[None, :], other=0.0)
        b_v = tl.dot(b_w, b_ha.to(b_w.dtype))
        if K > BK:
            tl.store(p_h + o_bv, b_hb.to(h.dtype.element_ty), mask=m_b[:, None])
            b_w = tl.load(w + o_t[:, None] * (HV * K) + o_b[None, :], mask=m_t[:, None] & m_b[None, :], other=0.0)
            b_v = tl.dot(b_w, b_hb.to(b_w.dtype), b_v)
        b_v = tl.load(u + o_tv, mask=m_t[:, None], other=0.0) - b_v
        tl.store(v_new + o_tv, b_v.to(v_new.dtype.element_ty), mask=m_t[:, None])
        last = tl.minimum(begin + step * BT + BT, end) - 1
        if USE_GK:
            b_decay = tl.load(gk + (last * HV + i_h) * K + o_a, mask=m_a, other=0.0)
            b_ha *= tl.exp2(b_decay)[:, None]
            if K > BK:
                b_decay = tl.load(gk + (last * HV + i_h) * K + o_b, mask=m_b, other=0.0)
                b_hb *= tl.exp2(b_decay)[:, None]
        else:
            b_last = tl.load(g + last * HV + i_h)
            b_g = tl.load(g + o_t * HV + i_h, mask=m_t, other=0.0)
            b_v *= tl.where(m_t, tl.exp2(b_last - b_g), 0.0)[:, None]
            b_ha *= tl.exp2(b_last)
            if K > BK:
                b_hb *= tl.exp2(b_last)
        b_v = b_v.to(k.dtype.element_ty)
        b_k = tl.load(k + o_t[None, :] * (H * K) + o_a[:, None], mask=m_a[:, None] & m_t[None, :], other=0.0)
        b_ha = tl.dot(b_k, b_v, b_ha)
        if K > BK:
            b_k = tl.load(k + o_t[None, :] * (H * K) + o_b[:, None], mask=m_b[:, None] & m_t[None, :], other=0.0)
            b_hb = tl.dot(b_k, b_v, b_hb)
        if WRITE_SLOTS:
            # A branch and not a mask: storing fp32 tiles takes a trip through shared memory, masked or not.
            if slot >= 0:
                tl.store(slots + slot * (HV * K * V) + o_av, b_ha, mask=m_a[:, None])
                if K > BK:
                    tl.store(slots + slot * (HV * K * V) + o_bv, b_hb, mask=m_b[:, None])
            # A step ahead, so that nothing waits for it; past the chain's end it is not used.
            slot = tl.load(node_slot + node + step + 1, mask=last + 1 < end, other=-1).to(tl.int64)


@triton.jit(do_not_specialize_on_alignment=_SLICES)
def states_backward(
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
    node = tl.load(first_node + chain)
    steps = tl.cdiv(end - begin, BT)

    o_r, o_v = tl.arange(0, BT), i_v * BV + tl.arange(0, BV)
    o_a, o_b = tl.arange(0, BK), BK + tl.arange(0, BK)
    m_a, m_b = o_a < K, o_b < K
    o_av, o_bv = o_a[:, None] * V + o_v[None, :], o_b[:, None] * V + o_v[None, :]
    q += (i_h // (HV // H)) * K
    k += (i_h // (HV // H)) * K
    w += i_h * K
    do += i_h * V
    dv += i_h * V
    dv_new += i_h * V
    dh += i_h * K * V
    d_slots += i_h * K * V

    b_da = tl.zeros([BK, BV], dtype=tl.float32)
    if K > BK:
        b_db = tl.zeros([BK, BV], dtype=tl.float32)
    slot = tl.load(node_slot + node + steps - 1).to(tl.int64)
    for back in range(steps):
        step = steps - 1 - back
        o_t = begin + step * BT + o_r
        m_t = o_t < end
        o_tv = o_t[:, None] * (HV * V) + o_v[None, :]
        p_dh = dh + (node + step) * (HV * K * V)
        if slot >= 0:
            b_da += tl.load(d_slots + slot * (HV * K * V) + o_av, mask=m_a[:, None], other=0.0)
            if K > BK:
                b_db += tl.load(d_slots + slot * (HV * K * V) + o_bv, mask=m_b[:, None], other=0.0)
        slot = tl.load(node_slot + node + step - 1, mask=step > 0, other=-1).to(tl.int64)
        tl.store(p_dh + o_av, b_da.to(dh.dtype.element_ty), mask=m_a[:, None])
        b_k = tl.load(k + o_t[:, None] * (H * K) + o_a[None, :], mask=m_t[:, None] & m_a[None, :], other=0.0)
        b_dv = tl.dot(b_k, b_da.to(b_k.dtype))
        if K > BK:
            tl.store(p_dh + o_bv, b_db.to(dh.dtype.element_ty), mask=m_b[:, None])
            b_k = tl.load(k + o_t[:, None] * (H * K) + o_b[None, :], mask=m_t[:, None] & m_b[None, :], other=0.0)
            b_dv = tl.dot(b_k, b_db.to(b_k.dtype), b_dv)
        last = tl.minimum(begin + step * BT + BT, end) - 1
        if not USE_GK:
            b_last = tl.load(g + last * HV + i_h)
            b_g = tl.load(g + o_t * HV + i_h, mask=m_t, other=0.0)
            b_dv *= tl.where(m_t, tl.exp2(b_last - b_g), 0.0)[:, None]
        b_dv += tl.load(dv + o_tv, mask=m_t[:, None], other=0.0)
        tl.store(dv_new + o_tv, b_dv.to(dv_new.dtype.element_ty), mask=m_t[:, None])
        b_do = tl.load(do + o_tv, mask=m_t[:, None], other=0.0)
        b_dv = b_dv.to(b_do.dtype)
        m_at, m_bt = m_a[:, None] & m_t[None, :], m_b[:, None] & m_t[None, :]
        b_q = tl.load(q + o_t[None, :] * (H * K) + o_a[:, None], mask=m_at, other=0.0)
        b_w = tl.load(w + o_t[None, :] * (HV * K) + o_a[:, None], mask=m_at, other=0.0)
        if USE_GK:
            b_da *= tl.exp2(tl.load(gk + (last * HV + i_h) * K + o_a, mask=m_a, other=0.0))[:, None]
        else:
            b_da *= tl.exp2(b_last)
            b_q = b_q * tl.exp2(b_g)[None, :]  # stays fp32: this product alone runs in TF32, as in FLA
        b_da += tl.dot(b_q, b_do.to(b_q.dtype)) * scale - tl.dot(b_w, b_dv)
        if K > BK:
            b_q = tl.load(q + o_t[None, :] * (H * K) + o_b[:, None], mask=m_bt, other=0.0)
            b_w = tl.load(w + o_t[None, :] * (HV * K) + o_b[:, None], mask=m_bt, other=0.0)
            if USE_GK:
                b_db *= tl.exp2(tl.load(gk + (last * HV + i_h) * K + o_b, mask=m_b, other=0.0))[:, None]
            else:
                b_db *= tl.exp2(b_last)
                b_q = b_q * tl.exp2(b_g)[None, :]
            b_db += tl.dot(b_q, b_do.to(b_q.dtype)) * scale - tl.dot(b_w, b_dv)
    start = tl.load(start_slot + chain)
    d_start += (chain * HV + i_h) * K * V
    tl.store(d_start + o_av, b_da, mask=m_a[:, None] & (start >= 0))
    if K > BK:
        tl.store(d_start + o_bv, b_db, mask=m_b[:, None] & (start >= 0))


@triton.jit(do_not_specialize_on_alignment=_SLICES)
def sum_children(d_slots, d_start, slot_ids, slot_ptr, slot_chains, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    slot = tl.load(slot_ids + tl.program_id(0)).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < SIZE
    total = tl.load(d_slots + slot * SIZE + offsets, mask=mask, other=0.0)
    begin, end = tl.load(slot_ptr + slot), tl.load(slot_ptr + slot + 1)
    for position in range(begin, end):
        chain = tl.load(slot_chains + position).to(tl.int64)
        total += tl.load(d_start + chain * SIZE + offsets, mask=mask, other=0.0)
    tl.store(d_slots + slot * SIZE + offsets, total, mask=mask)
