"""What a chunk of Kimi delta attention (one decay per channel) computes without knowing its start state."""

from typing import Any

import torch

from harts_hf.kernels.checks import exact_backward
from harts_hf.kernels.linear_attention.chunk import ChunkParts, bmm, dot, solve_backward, unit_lower_inverse
from harts_hf.kernels.linear_attention.decayed_scores import decayed_scores, decayed_scores_backward, span_sums


def kimi_chunks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> ChunkParts:
    """The parts for ``q``, ``k``, ``g`` ``[M, H, C, K]``, ``v`` ``[M, H, C, V]``, ``beta`` ``[M, H, C]``."""
    return ChunkParts(*_KimiChunks.apply(q, k, v, g, beta))


class _KimiChunks(torch.autograd.Function):
    """With ``e[i] = exp(g[0] + ... + g[i])``, ``a[i] = exp(g[i + 1] + ... + g[C - 1])`` and ``T`` the inverse of
    ``I + strictly lower part of diag(beta) key_scores``::

        query = e q      scores of q with k      reads = T (beta e k)
        writes = a k     decay = e[-1]           new_values = T (beta v)
    """

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        scores, key_scores = decayed_scores(q, k, g)
        until, after = span_sums(_spans(g), g).exp_().chunk(2, dim=2)
        inverse = unit_lower_inverse(key_scores * beta[..., None])
        query, writes = q * until, k * after
        reads = bmm(inverse, (k * until).mul_(beta[..., None]))
        new_values = bmm(inverse, v * beta[..., None])
        ctx.save_for_backward(q, k, v, g, beta, until, after, query, key_scores, inverse, reads, new_values, writes)
        return query, scores, reads, new_values, writes, until[..., -1, :].contiguous()

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
        q, k, v, g, beta, until, after, query, key_scores, inverse, reads, new_values, writes = ctx.saved_tensors
        grad_system, grad_keys, grad_values = solve_backward(inverse, reads, new_values, grad_reads, grad_new_values)
        grad_keys.mul_(until)
        keys_seen = grad_keys * k
        grad_beta = keys_seen.sum(dim=-1) + dot(grad_values, v) + dot(grad_system, key_scores)
        grad_q, grad_k, grad_g = decayed_scores_backward(q, k, g, grad_scores, grad_system.mul_(beta[..., None]))
        grad_q.addcmul_(grad_query, until)
        grad_k.addcmul_(grad_keys, beta[..., None]).addcmul_(grad_writes, after)
        from_start = keys_seen.mul_(beta[..., None]).addcmul_(grad_query, query)
        from_start[..., -1, :].addcmul_(grad_decay, until[..., -1, :])
        exponents = torch.cat([from_start, grad_writes * writes], dim=2)
        grad_g += span_sums(_spans(g).T, exponents)
        return grad_q, grad_k, grad_values.mul_(beta[..., None]), grad_g, grad_beta


def _spans(g: torch.Tensor) -> torch.Tensor:
    """``[2 C, C]``: rows that sum the slots up to each slot, then rows that sum the slots after each slot."""
    ones = torch.ones(g.shape[2], g.shape[2], dtype=g.dtype, device=g.device)
    return torch.cat([ones.tril(), ones.triu(1)])
