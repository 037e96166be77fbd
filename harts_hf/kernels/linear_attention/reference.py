"""The recurrences token by token, chunk node after chunk node: the meaning of the fast path."""

import torch

from harts_hf.batch import LinearTables
from harts_hf.kernels.checks import wide_dtype


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
    groups = v.shape[1] // q.shape[1]
    return kimi_delta_rule(
        q.repeat_interleave(groups, dim=1),
        k.repeat_interleave(groups, dim=1),
        v,
        g[..., None].expand(*g.shape, q.shape[2]),  # one decay for all channels of a head
        beta,
        tables,
        initial_states=initial_states,
        export_nodes=export_nodes,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm,
    )


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
    output_dtype, dtype = q.dtype, wide_dtype(q, k, v, g, beta, initial_states)
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    if use_qk_l2norm:
        q, k = (x / (x.square().sum(dim=-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q = q * scale
    rows_of_node = tables.gather.index.view(tables.num_nodes, tables.chunk_size)
    no_state = v.new_zeros(v.shape[1], q.shape[2], v.shape[2])
    states: list[torch.Tensor] = []  # after each node
    outputs: list[torch.Tensor] = []  # of each slot of each node
    for node, parent, initial, length in zip(
        range(tables.num_nodes),
        tables.parent.tolist(),
        tables.initial.tolist(),
        tables.lengths.tolist(),
        strict=True,
    ):
        state = states[parent] if parent >= 0 else initial_states[initial].to(dtype) if initial >= 0 else no_state
        for row in rows_of_node[node, :length].tolist():
            state = state * g[row].exp()[..., None]
            remembered = torch.einsum("hkv,hk->hv", state, k[row])
            correction = (v[row] - remembered) * beta[row][:, None]
            state = state + k[row][..., None] * correction[:, None, :]
            outputs.append(torch.einsum("hkv,hk->hv", state, q[row]))
        outputs += [torch.zeros_like(v[0])] * (tables.chunk_size - length)
        states.append(state)
    output = torch.stack(outputs)[tables.output.index].to(output_dtype)
    exported = [states[node] for node in export_nodes.tolist()]
    return output, torch.stack(exported) if exported else no_state.new_zeros(0, *no_state.shape)
