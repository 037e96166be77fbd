"""What a chunk of Kimi delta attention (one decay per channel) computes without knowing its start state."""

import torch

from harts_hf.kernels.linear_attention.chunk import ChunkParts, SolveChunk
from harts_hf.kernels.linear_attention.decayed_scores import DecayedScores, span_sums


def kimi_chunks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> ChunkParts:
    """The parts for ``q``, ``k``, ``g`` ``[M, H, C, K]``, ``v`` ``[M, H, C, V]``, ``beta`` ``[M, H, C]``."""
    scores, key_scores = DecayedScores.apply(q, k, g)
    size = g.shape[-2]
    ones = torch.ones(size, size, dtype=g.dtype, device=g.device)
    decay_until = span_sums(ones.tril(), g).exp()  # from the chunk's start up to each slot
    decay_after = span_sums(ones.triu(1), g).exp()  # from each slot to the chunk's end
    keys = k * beta[..., None]
    reads, new_values = SolveChunk.apply(key_scores * beta[..., None], keys * decay_until, v * beta[..., None])
    return ChunkParts(
        query=q * decay_until,
        scores=scores,
        reads=reads,
        new_values=new_values,
        writes=k * decay_after,
        decay=decay_until[..., -1, :],
    )
