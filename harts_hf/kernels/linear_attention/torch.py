"""The chunkwise rules in PyTorch, all nodes at once but for the state recurrence."""

import torch
from torch.nn import functional as F

from harts_hf.batch import LinearTables
from harts_hf.kernels.checks import wide_dtype
from harts_hf.kernels.gather.torch import gather_rows
from harts_hf.kernels.linear_attention.chunk import Chunks
from harts_hf.kernels.linear_attention.gated import GatedChunks
from harts_hf.kernels.linear_attention.kimi import KimiChunks
from harts_hf.kernels.linear_attention.order import LevelOrder, level_order
from harts_hf.kernels.linear_attention.scan import DeltaRule

_EPSILON = 1e-6
# The rounding of a batched matrix product depends on how its matrices lie in memory (seen with MKL): with channels
# filled up with zeros to a multiple of 64 bytes every one lies alike, whatever its place in the batch.
_CHANNELS = 16


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
    dtype = wide_dtype(q, k, v, g, beta, initial_states)
    queries, keys = q.to(dtype), k.to(dtype)
    if use_qk_l2norm:  # as Transformers' GDN modules write it
        queries, keys = (x * torch.rsqrt(_square_sum(x) + _EPSILON) for x in (queries, keys))
    rows = (queries * scale, keys, v.to(dtype), g.to(dtype), beta.to(dtype))
    return _run(GatedChunks, rows, tables, initial_states.to(dtype), export_nodes, q.dtype)


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
    dtype = wide_dtype(q, k, v, g, beta, initial_states)
    queries, keys = q.to(dtype), k.to(dtype)
    if use_qk_l2norm:  # as Transformers' KDA modules write it
        queries, keys = (x / torch.sqrt(_square_sum(x) + _EPSILON) for x in (queries, keys))
    rows = (queries * scale, keys, v.to(dtype), g.to(dtype), beta.to(dtype))
    return _run(KimiChunks, rows, tables, initial_states.to(dtype), export_nodes, q.dtype)


def _square_sum(x: torch.Tensor) -> torch.Tensor:
    return (x * x).sum(dim=-1, keepdim=True)


def _run(
    rule: type[Chunks],
    rows: tuple[torch.Tensor, ...],
    tables: LinearTables,
    initial_states: torch.Tensor,
    export_nodes: torch.Tensor,
    output_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows ``[E + N, heads, ...]`` in the wide dtype -> output rows and exported states."""
    order = level_order(tables, export_nodes)
    if len(order.initial) and int(order.initial.max()) >= len(initial_states):
        raise ValueError(
            f"expected initial_states for {int(order.initial.max()) + 1} boundary states, got {len(initial_states)}"
        )
    dim_k, dim_v = initial_states.shape[2:]
    inputs = (_chunked(_filled(x, x.dim() - 2), order) for x in rows)
    output, states = DeltaRule.apply(rule, order, _filled(initial_states, 2), *inputs)
    return output[..., :dim_v].to(output_dtype), states[..., :dim_k, :dim_v]


def _filled(x: torch.Tensor, num_dims: int) -> torch.Tensor:
    """``x`` with its last ``num_dims`` dimensions filled up with zeros to multiples of ``_CHANNELS``."""
    missing = [-size % _CHANNELS for size in x.shape[x.dim() - num_dims :]]
    return F.pad(x, [pad for size in reversed(missing) for pad in (0, size)]) if any(missing) else x


def _chunked(rows: torch.Tensor, order: LevelOrder) -> torch.Tensor:
    """``[R, heads, ...]`` -> ``[M, heads, C, ...]``, zeros in empty slots."""
    heads = rows.shape[1]
    positions = gather_rows(rows.flatten(0, 1), order.by_head(heads).gather)
    return positions.unflatten(0, (order.num_nodes, heads, order.chunk_size))
