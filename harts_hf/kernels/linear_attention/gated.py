"""What a chunk of the gated delta rule (one decay per head) computes without knowing its start state."""

import torch

from harts_hf.kernels.linear_attention.chunk import ChunkParts, solve_chunk


def gated_chunks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> ChunkParts:
    """The parts for ``q``, ``k`` ``[M, H, C, K]``, ``v`` ``[M, HV, C, V]``, ``g``, ``beta`` ``[M, HV, C]``.

    Decays between slots are exponentials of sums over exactly the slots between, not differences of running sums:
    nothing cancels, and the first slot's gate, which lies between no two slots, gets a gradient of exactly zero.
    """
    groups = v.shape[1] // k.shape[1]
    size = g.shape[-1]
    below = torch.ones(size, size, dtype=g.dtype, device=g.device).tril_(-1)
    # between[i, j] = g[j + 1] + ... + g[i] for i > j
    between = _left_multiply(below.new_ones(size, size).tril_(), g[..., None] * below)
    decay = between.exp().tril()
    until = g.cumsum(dim=-1)  # from the chunk's start up to each slot
    decay_until = until.exp()
    repeated_k = k.repeat_interleave(groups, dim=1)
    scores = (q @ k.mT).repeat_interleave(groups, dim=1) * decay
    system = (k @ k.mT).repeat_interleave(groups, dim=1) * decay * beta[..., None]
    reads, new_values = solve_chunk(system, repeated_k * (beta * decay_until)[..., None], v * beta[..., None])
    return ChunkParts(
        query=q.repeat_interleave(groups, dim=1) * decay_until[..., None],
        scores=scores,
        reads=reads,
        new_values=new_values,
        writes=repeated_k * decay[..., -1, :, None],
        decay=decay_until[..., -1:],
    )


def _left_multiply(matrix: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``matrix @ x`` for ``[C, C]`` and ``[M, h, C, C]`` as a batched product."""
    return (matrix.expand(x.shape[0] * x.shape[1], -1, -1) @ x.flatten(0, 1)).unflatten(0, x.shape[:2])
