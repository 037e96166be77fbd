"""The delta rules on a tree with Flash Linear Attention's chunk-parallel kernels and our own state kernels.

Every chunk-parallel stage runs once for all chunk nodes of a group (FLA's stage functions, called as its own autograd
functions call them); the state recurrence runs once a round. Groups are as large as memory allows (see
:mod:`harts_hf.kernels.linear_attention.fla_tables`), so launches do not grow with the number of branches. Kept for the
backward: what FLA keeps (packed q, k, v, beta, cumulative gates, the solved triangle) and the slots; w, u and h are
computed again.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from harts_hf.batch import LinearTables
from harts_hf.kernels.gather.triton import take_rows
from harts_hf.kernels.gpu_versions import assert_fla_backends_off, require_linear_attention, switch_off_fla_backends
from harts_hf.kernels.linear_attention.fla_tables import ChainGroup, PackedChains, packed_chains
from harts_hf.kernels.linear_attention.triton_pack import pack_rows, unpack_gradients
from harts_hf.kernels.linear_attention.triton_states import run_states_backward, run_states_forward

require_linear_attention()
switch_off_fla_backends()

from fla.ops.common.chunk_o import chunk_bwd_dqkwg, chunk_bwd_dv_local, chunk_fwd_o  # noqa: E402
from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra  # noqa: E402
from fla.ops.gated_delta_rule.wy_fast import prepare_wy_repr_bwd, recompute_w_u_fwd  # noqa: E402
from fla.ops.gla.chunk import chunk_gla_fwd_o_gk  # noqa: E402
from fla.ops.kda.chunk_bwd import chunk_kda_bwd_dAv, chunk_kda_bwd_wy_dqkg_fused  # noqa: E402
from fla.ops.kda.chunk_intra import chunk_kda_bwd_intra, chunk_kda_fwd_intra  # noqa: E402
from fla.ops.kda.wy_fast import recompute_w_u_fwd as recompute_w_u_kda  # noqa: E402
from fla.ops.utils import chunk_local_cumsum  # noqa: E402
from fla.ops.utils.constant import RCP_LN2  # noqa: E402

assert_fla_backends_off()


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    tables: LinearTables,
    *,
    initial_states: torch.Tensor,
    export_nodes: torch.Tensor,
    scale: float,
    use_qk_l2norm: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`harts_hf.kernels.linear_attention.api.tree_gated_delta_rule`."""
    _check_dtypes(q, k, v)
    chains = packed_chains(tables, export_nodes, len(initial_states))
    return _Rule.apply(_GATED, q, k, v, g, beta, initial_states, chains, scale, use_qk_l2norm)


def kimi_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    tables: LinearTables,
    *,
    initial_states: torch.Tensor,
    export_nodes: torch.Tensor,
    scale: float,
    use_qk_l2norm: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`harts_hf.kernels.linear_attention.api.tree_kimi_delta_rule`."""
    _check_dtypes(q, k, v)
    chains = packed_chains(tables, export_nodes, len(initial_states))
    return _Rule.apply(_KIMI, q, k, v, g, beta, initial_states, chains, scale, use_qk_l2norm)


def _check_dtypes(*tensors: torch.Tensor) -> None:
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1 or not dtypes <= {torch.bfloat16, torch.float16, torch.float32}:
        raise ValueError(f"expected q, k and v all in bfloat16, float16 or float32, got {sorted(map(str, dtypes))}")


def _new_slots(initial_states: torch.Tensor, chains: PackedChains) -> torch.Tensor:
    slots = initial_states.new_empty(chains.num_slots, *initial_states.shape[1:], dtype=torch.float32)
    if chains.num_initial:
        slots[: chains.num_initial] = initial_states
    return slots


def _own_outputs(packed: torch.Tensor, chains: PackedChains) -> torch.Tensor:
    packed = packed.squeeze(0)
    return packed if chains.output_is_identity else take_rows(packed, chains.output)


def _output_gradients(d_output: torch.Tensor, chains: PackedChains, group: ChainGroup) -> torch.Tensor:
    """``[1, P, HV, V]`` for the positions of a group."""
    positions = slice(*group.positions)
    if chains.output_is_identity:
        return d_output[positions].contiguous()[None]
    return take_rows(d_output, chains.output_reader[positions])[None]


class _Joined:
    """Tensors ``[1, P, ...]`` filled group by group; those of a single group are taken as they are."""

    def __init__(self, chains: PackedChains) -> None:
        self._chains = chains
        self._whole: list[torch.Tensor] = []

    def put(self, group: ChainGroup, *parts: torch.Tensor) -> None:
        """The group's parts."""
        if len(self._chains.groups) == 1:
            self._whole = list(parts)
            return
        if not self._whole:
            positions = self._chains.num_positions
            self._whole = [part.new_empty(1, positions, *part.shape[2:]) for part in parts]
        for whole, part in zip(self._whole, parts, strict=True):
            whole[:, slice(*group.positions)] = part

    def take(self) -> list[torch.Tensor]:
        """The whole tensors."""
        return self._whole


def _cut(group: ChainGroup, *packed: torch.Tensor) -> list[torch.Tensor]:
    return [x[:, slice(*group.positions)] for x in packed]


def _where(chains: PackedChains, group: ChainGroup) -> tuple[dict[str, Any], dict[str, Any]]:
    """What stages are told about a group: without and with the chunk size."""
    where = {"cu_seqlens": group.cu_seqlens, "chunk_indices": group.chunk_indices}
    return where, {"chunk_size": chains.chunk_size, **where}


def _slot_gradients(d_states: torch.Tensor, slots: torch.Tensor, chains: PackedChains) -> torch.Tensor:
    d_slots = torch.zeros_like(slots)
    if len(chains.export_slot):
        d_slots[chains.export_slot] = d_states.float()
    return d_slots


class _Stages(NamedTuple):
    """What a rule computes for one group.

    Attributes:
        forward: cumulative gates, what the backward needs besides, and the outputs; fills the group's slots.
        backward: gradients of the packed q, k, v, g and beta; adds to those of the slots that the group starts from.
    """

    forward: Callable[..., tuple[torch.Tensor, ...]]
    backward: Callable[..., tuple[torch.Tensor, ...]]


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        stages: _Stages,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_states: torch.Tensor,
        chains: PackedChains,
        scale: float,
        norm: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.dtypes = tuple(x.dtype for x in (q, k, v, g, beta))
        q, k, v, g, beta, q_rstd, k_rstd = pack_rows(q, k, v, g, beta, chains, norm=norm)
        slots = _new_slots(initial_states, chains)
        joined = _Joined(chains)
        for group in chains.groups:
            parts = _cut(group, q, k, v, g, beta)
            joined.put(group, *stages.forward(*parts, slots=slots, chains=chains, group=group, scale=scale))
        g, *kept, output = joined.take()
        ctx.save_for_backward(q_rstd, k_rstd, slots, q, k, v, g, beta, *kept)
        ctx.stages, ctx.chains, ctx.scale, ctx.norm = stages, chains, scale, norm
        return _own_outputs(output, chains), slots[chains.export_slot]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: torch.Tensor, d_states: torch.Tensor) -> tuple[Any, ...]:
        q_rstd, k_rstd, slots, *packed = ctx.saved_tensors
        chains = ctx.chains
        d_slots = _slot_gradients(d_states, slots, chains)
        joined = _Joined(chains)
        for group in reversed(chains.groups):
            do = _output_gradients(d_output, chains, group)
            parts = _cut(group, *packed)
            where = {"slots": slots, "d_slots": d_slots, "chains": chains, "group": group}
            joined.put(group, *ctx.stages.backward(*parts, do=do, **where, scale=ctx.scale))
        q, k = packed[:2]
        rows = unpack_gradients(joined.take(), q, k, q_rstd, k_rstd, chains, ctx.dtypes, norm=ctx.norm)
        return None, *rows, d_slots[: chains.num_initial], None, None, None


def _gated_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    slots: torch.Tensor,
    chains: PackedChains,
    group: ChainGroup,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cumulative gates, the solved triangle and the outputs of one group; fills its slots."""
    _, sizes = _where(chains, group)
    g = chunk_local_cumsum(g, scale=RCP_LN2, **sizes)
    w, u, solved = chunk_gated_delta_rule_fwd_intra(k=k, v=v, g=g, beta=beta, **sizes)
    h, v_new = run_states_forward(k, w, u, g, slots, group, chunk_size=chains.chunk_size, write_slots=True)
    del w, u
    return g, solved, chunk_fwd_o(q=q, k=k, v=v_new, h=h, g=g, scale=scale, **sizes)


def _gated_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    solved: torch.Tensor,
    *,
    do: torch.Tensor,
    slots: torch.Tensor,
    d_slots: torch.Tensor,
    chains: PackedChains,
    group: ChainGroup,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    """Gradients of the packed q, k, v, g and beta of one group; adds to those of the slots that it starts from."""
    where, sizes = _where(chains, group)
    w, u = recompute_w_u_fwd(k=k, v=v, beta=beta, A=solved, g=g, **where)
    h, v_new = run_states_forward(k, w, u, g, slots, group, chunk_size=chains.chunk_size, write_slots=False)
    del u
    dv = chunk_bwd_dv_local(q=q, k=k, g=g, do=do, scale=scale, **sizes)
    dh, dv = run_states_backward(q, k, w, g, do, dv, d_slots, group, chunk_size=chains.chunk_size, scale=scale)
    dq, dk, dw, dg = chunk_bwd_dqkwg(q=q, k=k, v=v_new, w=w, g=g, h=h, dv=dv, do=do, dh=dh, scale=scale, **sizes)
    del h, dh, v_new, w, do
    dk_wy, dv, db, dg_wy = prepare_wy_repr_bwd(k=k, v=v, beta=beta, g=g, A=solved, dw=dw, du=dv, **where)
    dk.add_(dk_wy)
    dg.add_(dg_wy)
    return dq, dk, dv, chunk_local_cumsum(dg, reverse=True, **sizes), db


def _kimi_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    slots: torch.Tensor,
    chains: PackedChains,
    group: ChainGroup,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    """Cumulative gates, scores, the solved triangle and the outputs of one group; fills its slots."""
    _, sizes = _where(chains, group)
    g = chunk_local_cumsum(g, scale=RCP_LN2, **sizes)
    w, u, _, k_decayed, scores, solved = chunk_kda_fwd_intra(q=q, k=k, v=v, gk=g, beta=beta, scale=scale, **sizes)
    h, v_new = run_states_forward(k_decayed, w, u, g, slots, group, chunk_size=chains.chunk_size, write_slots=True)
    del w, u, k_decayed
    return g, scores, solved, chunk_gla_fwd_o_gk(q=q, v=v_new, g=g, A=scores, h=h, scale=scale, **sizes)


def _kimi_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scores: torch.Tensor,
    solved: torch.Tensor,
    *,
    do: torch.Tensor,
    slots: torch.Tensor,
    d_slots: torch.Tensor,
    chains: PackedChains,
    group: ChainGroup,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    """Gradients of the packed q, k, v, g and beta of one group; adds to those of the slots that it starts from."""
    where, sizes = _where(chains, group)
    w, u, q_decayed, k_decayed = recompute_w_u_kda(q=q, k=k, v=v, beta=beta, A=solved, gk=g, **where)
    h, v_new = run_states_forward(k_decayed, w, u, g, slots, group, chunk_size=chains.chunk_size, write_slots=False)
    del u
    d_scores, dv = chunk_kda_bwd_dAv(q=q, k=k, v=v_new, do=do, A=scores, scale=scale, **sizes)
    dh, dv = run_states_backward(
        q_decayed, k_decayed, w, g, do, dv, d_slots, group, chunk_size=chains.chunk_size, scale=scale
    )
    del w, q_decayed, k_decayed
    dq, dk, dv, db, dg, d_solved = chunk_kda_bwd_wy_dqkg_fused(
        q=q, k=k, v=v, v_new=v_new, g=g, beta=beta, A=solved, h=h, do=do, dh=dh, dv=dv, scale=scale, **sizes
    )
    del h, dh, v_new, do
    dq, dk, db, dg = chunk_kda_bwd_intra(
        q=q, k=k, g=g, beta=beta, dAqk=d_scores, dAkk=d_solved, dq=dq, dk=dk, db=db, dg=dg, **sizes
    )
    return dq, dk, dv, chunk_local_cumsum(dg, reverse=True, **sizes), db


_GATED = _Stages(_gated_forward, _gated_backward)
_KIMI = _Stages(_kimi_forward, _kimi_backward)
