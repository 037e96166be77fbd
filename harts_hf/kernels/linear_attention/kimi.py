"""What a chunk of Kimi delta attention (one decay per channel) computes without knowing its start state."""

from dataclasses import dataclass
from typing import Self

import torch

from harts_hf.kernels.linear_attention.chunk import ChunkGrads, Chunks, dot
from harts_hf.kernels.linear_attention.decayed_scores import decayed_scores, decayed_scores_backward, span_sums


@dataclass(frozen=True, eq=False, kw_only=True)
class KimiChunks(Chunks):
    """With ``until[i] = exp(g[0] + ... + g[i])``, ``after[i] = exp(g[i + 1] + ... + g[C - 1])``::

        query = until q     keys = beta until k    values = beta v     writes = after k    decay = until[-1]

    Attributes:
        g: ``[M, H, C, K]``.
        after: ``[M, H, C, K]``.
    """

    g: torch.Tensor
    after: torch.Tensor

    @classmethod
    def build(cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> Self:
        until, after = span_sums(_spans(g), g).exp_().chunk(2, dim=2)
        scores, key_scores = decayed_scores(q, k, g)
        return cls(q=q, k=k, v=v, beta=beta, until=until, scores=scores, key_scores=key_scores, g=g, after=after)

    @property
    def query(self) -> torch.Tensor:
        return self.q * self.until

    @property
    def keys(self) -> torch.Tensor:
        return (self.k * self.until).mul_(self.beta[..., None])

    @property
    def writes(self) -> torch.Tensor:
        return self.k * self.after

    @property
    def decay(self) -> torch.Tensor:
        return self.until[..., -1, :]

    def backward(self, grads: ChunkGrads) -> tuple[torch.Tensor, ...]:
        grad_system, grad_keys = grads.system.tril_(-1), grads.keys.mul_(self.until)
        keys_seen = grad_keys * self.k
        grad_beta = keys_seen.sum(dim=-1) + dot(grads.values, self.v) + dot(grad_system, self.key_scores)
        grad_key_scores = grad_system.mul_(self.beta[..., None])
        grad_q, grad_k, grad_g = decayed_scores_backward(self.q, self.k, self.g, grads.scores, grad_key_scores)
        grad_q.addcmul_(grads.query, self.until)
        grad_k.addcmul_(grad_keys, self.beta[..., None]).addcmul_(grads.writes, self.after)
        from_start = keys_seen.mul_(self.beta[..., None]).addcmul_(grads.query, self.query)
        from_start[..., -1, :].addcmul_(grads.decay, self.decay)
        exponents = torch.cat([from_start, grads.writes.mul_(self.writes)], dim=2)
        grad_g += span_sums(_spans(self.g).T, exponents)
        return grad_q, grad_k, grads.values.mul_(self.beta[..., None]), grad_g, grad_beta


def _spans(g: torch.Tensor) -> torch.Tensor:
    """``[2 C, C]``: rows that sum the slots up to each slot, then rows that sum the slots after each slot."""
    ones = torch.ones(g.shape[2], g.shape[2], dtype=g.dtype, device=g.device)
    return torch.cat([ones.tril(), ones.triu(1)])
