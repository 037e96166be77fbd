"""Runs the state recurrence of :mod:`harts_hf.kernels.linear_attention.triton_state_kernels`, a launch a round."""

import functools
from itertools import pairwise

import torch
import triton

from harts_hf.kernels.linear_attention.fla_tables import ChainGroup
from harts_hf.kernels.linear_attention.triton_state_kernels import states_backward, states_forward, sum_children

_WARPS = 4
# Widest first, by (bytes of an element of the keys, backward): what fits a Hopper processor's registers and memory.
_WIDTHS = {(2, False): (64, 32, 16), (2, True): (32, 16), (4, False): (32, 16), (4, True): (16,)}
_STAGES = {2: 3, 4: 2}


def choose_block_v(
    nodes: int, longest: int, value_heads: int, dim_v: int, *, backward: bool, element_size: int = 2
) -> int:
    """Value columns a program takes: the widest with which the longest chain is not what lasts.

    Wide blocks read keys less often; narrow ones let few chains and heads fill the chip. Columns do not meet in any
    sum, so the width changes no result.

    Args:
        nodes: of all chains of the launch.
        longest: nodes of its longest chain.
        value_heads: HV.
        dim_v: V, a multiple of 16.
        backward: which of the kernels.
        element_size: bytes of an element of the keys, 2 or 4.
    """
    if dim_v % 16:
        raise ValueError(f"expected a value dimension that is a multiple of 16, got {dim_v}")
    for block_v in _WIDTHS[element_size, backward]:
        steps = nodes * value_heads * (dim_v // block_v) / _num_processors()
        if dim_v % block_v == 0 and steps >= 0.9 * longest:
            return block_v
    return 16


@functools.cache
def _num_processors() -> int:
    if not torch.cuda.is_available():
        return 132  # the interpreter's; any number does
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def _block_k(dim_k: int) -> int:
    """Keys a product takes: two products of 64 rows suit the tensor cores better than one of 128."""
    if dim_k > 128:
        raise ValueError(f"expected keys of at most 128 dimensions, got {dim_k}")
    return min(64, max(triton.next_power_of_2(dim_k), 16))


def run_states_forward(
    k: torch.Tensor,
    w: torch.Tensor,
    u: torch.Tensor,
    g: torch.Tensor,
    slots: torch.Tensor,
    chains: ChainGroup,
    *,
    chunk_size: int,
    write_slots: bool,
    block_v: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the recurrence over every chain of a group of ``M`` nodes and ``P`` positions.

    Args:
        k: ``[1, P, H, K]`` keys, already decayed to the chunk's end for KDA.
        w: ``[1, P, HV, K]`` and u: ``[1, P, HV, V]`` WY factors.
        g: cumulative log2 decay within each chunk, fp32: ``[1, P, HV]`` (GDN) or ``[1, P, HV, K]`` (KDA).
        slots: ``[S, HV, K, V]`` fp32, of the whole tree. The group's are filled round by round if ``write_slots``;
            otherwise all of them must be filled already, and one launch does.
        chains: the group.
        chunk_size: C.
        write_slots: see there.
        block_v: value columns a program takes, None to choose.

    Returns:
        ``h`` ``[1, M, HV, K, V]``, the state before each node, and ``v_new`` ``[1, P, HV, V]``, in the dtype of k.
    """
    heads, dim_k, value_heads, dim_v = k.shape[2], k.shape[3], u.shape[2], u.shape[3]
    h = k.new_empty(1, chains.num_nodes, value_heads, dim_k, dim_v)
    v_new = torch.empty_like(u)
    launches = list(zip(pairwise(chains.round_ptr), chains.round_nodes, chains.round_longest, strict=True))
    if not write_slots:
        launches = [((0, chains.num_chains), sum(chains.round_nodes), max(chains.round_longest, default=0))]
    for (begin, end), nodes, longest in launches:
        width = block_v or choose_block_v(
            nodes, longest, value_heads, dim_v, backward=False, element_size=k.element_size()
        )
        states_forward[((end - begin) * value_heads * (dim_v // width),)](
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
            BT=chunk_size,
            BK=_block_k(dim_k),
            BV=width,
            USE_GK=g.dim() == 4,
            WRITE_SLOTS=write_slots,
            num_warps=_WARPS,
            num_stages=_STAGES[k.element_size()],
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
    chains: ChainGroup,
    *,
    chunk_size: int,
    scale: float,
    block_v: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the recurrence's backward over a group, last round first; later groups have been run before.

    Args:
        q, k, w, g: as in the forward; q is ``q * exp2(g)`` for KDA.
        do: ``[1, P, HV, V]`` gradient of the outputs.
        dv: ``[1, P, HV, V]`` gradient of ``v_new`` from within the chunk.
        d_slots: ``[S, HV, K, V]`` fp32 gradients of exported states, zero elsewhere; what comes from the group's
            chains is added to the slots that they start from. After all groups, a boundary state's is its gradient.
        chains: the group.
        chunk_size: C.
        scale: of q.
        block_v: value columns a program takes, None to choose.

    Returns:
        ``dh`` ``[1, M, HV, K, V]``, gradient of the state after each node, and the whole gradient of ``v_new``.
    """
    heads, dim_k, value_heads, dim_v = k.shape[2], k.shape[3], do.shape[2], do.shape[3]
    dh = k.new_empty(1, chains.num_nodes, value_heads, dim_k, dim_v)
    dv_new = torch.empty_like(dv)
    size = value_heads * dim_k * dim_v
    d_start = torch.empty(chains.num_chains if chains.num_slots else 0, size, dtype=torch.float32, device=k.device)
    for index in range(chains.num_rounds - 1, -1, -1):
        begin, end = chains.round_ptr[index : index + 2]
        work = chains.round_nodes[index], chains.round_longest[index]
        width = block_v or choose_block_v(*work, value_heads, dim_v, backward=True, element_size=k.element_size())
        states_backward[((end - begin) * value_heads * (dim_v // width),)](
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
            BT=chunk_size,
            BK=_block_k(dim_k),
            BV=width,
            USE_GK=g.dim() == 4,
            num_warps=_WARPS,
            num_stages=_STAGES[k.element_size()],
        )
        first, last = chains.slot_round_ptr[index : index + 2]
        if last > first:
            block = min(1024, triton.next_power_of_2(size))
            sum_children[(last - first, triton.cdiv(size, block))](
                d_slots,
                d_start,
                chains.slots_by_round[first:last],
                chains.slot_ptr,
                chains.slot_chains,
                SIZE=size,
                BLOCK=block,
            )
    return dh, dv_new
