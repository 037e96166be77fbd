"""The state kernels alone against fp64."""

import itertools

import numpy as np
import torch

from benchmarks.gpu.trees import Forest
from harts_hf.kernels.linear_attention.fla_tables import PackedChains, build_packed_chains
from harts_hf.planner.chunks import CHUNK_SIZE


def states(forest: Forest, device: str = "cuda") -> dict[str, float]:
    """The state kernels alone, fp32 and bf16 inputs, in one group and in many, against fp64 node by node."""
    from harts_hf.kernels.linear_attention.triton_states import run_states_forward

    result = {}
    tables = forest.linear_tables().to(device)
    whole = build_packed_chains(tables, np.zeros(0, np.int64), 0, group_size=10**9)
    for dtype, kimi in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        generator = torch.Generator(device=device).manual_seed(1)

        def rand(*shape: int, generator=generator) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        heads, value_heads, dim, positions = (4 if kimi else 2), 4, 128, whole.num_positions
        k = (rand(1, positions, heads, dim) * dim**-0.5).to(dtype)
        w, u = (
            (rand(1, positions, value_heads, dim) * dim**-0.5).to(dtype),
            rand(1, positions, value_heads, dim).to(dtype),
        )
        gate = (
            -torch.rand(1, positions, value_heads, *([dim] if kimi else []), generator=generator, device=device) * 0.05
        )
        g = gate.clone()
        for begin, end in node_rows(whole):
            g[:, begin:end] = gate[:, begin:end].cumsum(1)
        found = {}
        for size in (10**9, 8):
            chains = build_packed_chains(tables, np.zeros(0, np.int64), 0, group_size=size)
            slots = torch.full((chains.num_slots, value_heads, dim, dim), float("nan"), device=device)
            parts = []
            for group in chains.groups:
                cut = [x[:, slice(*group.positions)] for x in (k, w, u, g)]
                parts.append(run_states_forward(*cut, slots, group, chunk_size=CHUNK_SIZE, write_slots=True))
            found[size] = [torch.cat(column, 1) for column in zip(*parts, strict=True)] + [slots]
        same = all(torch.equal(a, b) for a, b in zip(*found.values(), strict=True))
        exact = states_by_node(*(x.double() for x in (k, w, u, g)), whole)
        error = max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(found[10**9][:2], exact, strict=True))
        key = f"{str(dtype).removeprefix('torch.')} {'kda' if kimi else 'gdn'}"
        result[key] = error if same else float("inf")
        print("states", key, error, "one group equals many:", same, flush=True)
    return result


def node_rows(chains: PackedChains) -> list[tuple[int, int]]:
    """Places of each packed node."""
    rows = []
    for group in chains.groups:
        ends = group.cu_seqlens.tolist()
        for chain, step in group.chunk_indices.tolist():
            begin, end = ends[chain] + CHUNK_SIZE * step, ends[chain + 1]
            rows.append((group.positions[0] + begin, group.positions[0] + min(begin + CHUNK_SIZE, end)))
    return rows


def states_by_node(k, w, u, g, chains: PackedChains) -> list[torch.Tensor]:
    """h and v_new in the inputs' dtype, of chains in one group."""
    (group,) = chains.groups
    repeat, rows, slots = w.shape[2] // k.shape[2], node_rows(chains), {}
    h, v_new = [None] * len(rows), [None] * len(rows)
    firsts, node_slot = [*group.first_node.tolist(), len(rows)], group.node_slot.tolist()
    for chain in group.chains_by_round.tolist():
        start = int(group.start_slot[chain])
        state = slots[start] if start >= 0 else u.new_zeros(w.shape[2], w.shape[3], u.shape[3])
        for node in range(firsts[chain], firsts[chain + 1]):
            begin, end = rows[node]
            k_n, g_n = k[0, begin:end].repeat_interleave(repeat, 1), g[0, begin:end]
            h[node] = state
            v_new[node] = u[0, begin:end] - torch.einsum("thk,hkv->thv", w[0, begin:end], state)
            last = g_n[-1].exp2()
            decayed = v_new[node] if g.dim() == 4 else v_new[node] * (g_n[-1] - g_n).exp2()[..., None]
            state = state * (last[..., None] if g.dim() == 4 else last[:, None, None])
            state = state + torch.einsum("thk,thv->hkv", k_n, decayed)
            if node_slot[node] >= 0:
                slots[node_slot[node]] = state
    return [torch.stack(h)[None], torch.cat(v_new)[None]]
