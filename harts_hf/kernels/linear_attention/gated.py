"""What a chunk of the gated delta rule (one decay per head) computes without knowing its start state."""

from typing import Any

import torch

from harts_hf.kernels.checks import exact_backward
from harts_hf.kernels.linear_attention.chunk import ChunkParts, bmm, dot, solve_backward, unit_lower_inverse


def gated_chunks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> ChunkParts:
    """The parts for ``q``, ``k`` ``[M, H, C, K]``, ``v`` ``[M, HV, C, V]``, ``g``, ``beta`` ``[M, HV, C]``.

    Decays between slots are exponentials of sums over exactly the slots between, not differences of running sums:
    nothing cancels, and the first slot's gate, which lies between no two slots, gets a gradient of exactly zero.
    """
    return ChunkParts(*_GatedChunks.apply(q, k, v, g, beta))


class _GatedChunks(torch.autograd.Function):
    """With ``D[i, j] = exp(g[j + 1] + ... + g[i])`` for ``i >= j``, ``e[i] = exp(g[0] + ... + g[i])`` and ``T`` the
    inverse of ``I + strictly lower part of diag(beta) (k k^T * D)``::

        query = e q        scores = q k^T * D       reads = T (beta e k)
        writes = D[-1] k   decay = e[-1]            new_values = T (beta v)
    """

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        groups = v.shape[1] // k.shape[1]
        below = torch.ones(g.shape[-1], g.shape[-1], dtype=g.dtype, device=g.device).tril_(-1)
        decay = (g[..., None] * below).cumsum(dim=-2).exp_().tril_()
        decay_until = g.cumsum(dim=-1).exp_()
        q_heads, k_heads = _repeat(q, groups), _repeat(k, groups)
        scores = _repeat(bmm(q, k.mT), groups) * decay
        key_scores = _repeat(bmm(k, k.mT), groups) * decay
        system = (key_scores * beta[..., None]).tril_(-1)
        inverse = unit_lower_inverse(system)
        query = q_heads * decay_until[..., None]
        reads = bmm(inverse, k_heads * (beta * decay_until)[..., None])
        new_values = bmm(inverse, v * beta[..., None])
        writes = k_heads * decay[..., -1, :, None]
        ctx.save_for_backward(
            q, k, v, beta, decay, decay_until, query, scores, key_scores, inverse, reads, new_values, writes
        )
        return query, scores, reads, new_values, writes, decay_until[..., -1:].contiguous()

    @staticmethod
    @exact_backward
    def backward(
        ctx: Any,
        grad_query: torch.Tensor,
        grad_scores: torch.Tensor,
        grad_reads: torch.Tensor,
        grad_new_values: torch.Tensor,
        grad_writes: torch.Tensor,
        grad_decay: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        q, k, v, beta, decay, until, query, scores, key_scores, inverse, reads, new_values, writes = ctx.saved_tensors
        groups = v.shape[1] // k.shape[1]
        grad_system, grad_keys, grad_values = solve_backward(inverse, reads, new_values, grad_reads, grad_new_values)

        keys_seen = dot(grad_keys, _repeat(k, groups)) * until
        grad_beta = keys_seen + dot(grad_values, v) + dot(grad_system, key_scores)
        grad_key_scores = grad_system.mul_(beta[..., None])

        # Exponents: those between two slots, then those from the chunk's start.
        between = (grad_scores * scores).addcmul_(grad_key_scores, key_scores)
        between[..., -1, :] += dot(grad_writes, writes)
        from_start = dot(grad_query, query) + keys_seen * beta
        from_start[..., -1:] += grad_decay * until[..., -1:]
        ones = torch.ones_like(between[0, 0])
        after = ones.triu().expand_as(between)  # row t adds the rows from t on
        grad_g = bmm(after, between).mul_(ones.tril(-1)).sum(dim=-1) + bmm(after, from_start[..., None]).squeeze(-1)

        scores_by_head = _sum_groups(grad_scores * decay, groups)
        keys_by_head = _sum_groups(grad_key_scores.mul_(decay), groups)
        grad_q = _sum_groups(grad_query * until[..., None], groups)
        grad_q += bmm(scores_by_head, k)
        grad_keys = grad_keys.mul_((beta * until)[..., None]).addcmul_(grad_writes, decay[..., -1, :, None])
        grad_k = _sum_groups(grad_keys, groups)
        grad_k += bmm(scores_by_head.mT, q)
        grad_k += bmm(keys_by_head + keys_by_head.mT, k)
        return grad_q, grad_k, grad_values.mul_(beta[..., None]), grad_g, grad_beta


def _repeat(x: torch.Tensor, groups: int) -> torch.Tensor:
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def _sum_groups(x: torch.Tensor, groups: int) -> torch.Tensor:
    return x if groups == 1 else x.unflatten(1, (-1, groups)).sum(dim=2)
