"""What a chunk of the gated delta rule (one decay per head) computes without knowing its start state."""

from dataclasses import dataclass
from typing import Self

import torch

from harts_hf.kernels.linear_attention.chunk import ChunkGrads, Chunks, add_bmm_, bmm, dot


@dataclass(frozen=True, eq=False, kw_only=True)
class GatedChunks(Chunks):
    """With ``between[i, j] = exp(g[j + 1] + ... + g[i])`` for ``i >= j``, ``until[i] = exp(g[0] + ... + g[i])``::

        query = until q           keys = beta until k        values = beta v
        scores = q k^T * between  system = diag(beta) (k k^T * between)
        writes = between[-1] k    decay = until[-1]

    Decays are exponentials of sums over exactly the slots between, not of differences of running sums: nothing
    cancels, and the first slot's gate, which lies between no two slots, gets a gradient of exactly zero.

    Attributes:
        between: ``[M, h, C, C]``.
    """

    between: torch.Tensor

    @classmethod
    def build(cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> Self:
        groups = v.shape[1] // k.shape[1]
        below = torch.ones(g.shape[-1], g.shape[-1], dtype=g.dtype, device=g.device).tril_(-1)
        between = (g[..., None] * below).cumsum_(dim=-2).exp_().tril_()
        scores, key_scores = (_repeat(bmm(x, k.mT), groups).mul_(between) for x in (q, k))
        until = g.cumsum(dim=-1).exp_()
        return cls(q=q, k=k, v=v, beta=beta, until=until, scores=scores, key_scores=key_scores, between=between)

    @property
    def query(self) -> torch.Tensor:
        return self._by_value_head(self.q) * self.until[..., None]

    @property
    def keys(self) -> torch.Tensor:
        return self._by_value_head(self.k) * (self.beta * self.until)[..., None]

    @property
    def writes(self) -> torch.Tensor:
        return self._by_value_head(self.k) * self.between[..., -1, :, None]

    @property
    def decay(self) -> torch.Tensor:
        return self.until[..., -1:]

    def backward(self, grads: ChunkGrads) -> tuple[torch.Tensor, ...]:
        groups, until, after = self.v.shape[1] // self.k.shape[1], self.until, self.between[..., -1, :]
        queries, keys, grad_system = self._by_value_head(self.q), self._by_value_head(self.k), grads.system.tril_(-1)
        keys_seen = dot(grads.keys, keys) * until
        grad_beta = keys_seen + dot(grads.values, self.v) + dot(grad_system, self.key_scores)
        grad_key_scores = grad_system.mul_(self.beta[..., None])

        # Exponents: those between two slots, then those from the chunk's start.
        exponents = (grads.scores * self.scores).addcmul_(grad_key_scores, self.key_scores)
        exponents[..., -1, :] += dot(grads.writes, keys) * after
        from_start = dot(grads.query, queries) * until + keys_seen * self.beta
        from_start[..., -1:] += grads.decay * until[..., -1:]
        before = torch.ones_like(exponents[0, 0]).triu_(1).expand_as(exponents)  # column t adds the columns before t
        grad_g = bmm(exponents, before).tril_().sum(dim=-2) + from_start.flip(-1).cumsum(-1).flip(-1)

        grad_products = _sum_groups(grads.scores.mul_(self.between), groups)
        grad_key_products = _sum_groups(grad_key_scores.mul_(self.between), groups)
        grad_q = _sum_groups(grads.query.mul_(until[..., None]), groups)
        add_bmm_(grad_q, grad_products, self.k)
        grads.keys.mul_((self.beta * until)[..., None]).addcmul_(grads.writes, after[..., None])
        grad_k = _sum_groups(grads.keys, groups)
        add_bmm_(grad_k, grad_products.mT, self.q)
        add_bmm_(grad_k, grad_key_products, self.k)
        add_bmm_(grad_k, grad_key_products.mT, self.k)
        return grad_q, grad_k, grads.values.mul_(self.beta[..., None]), grad_g, grad_beta

    def _by_value_head(self, x: torch.Tensor) -> torch.Tensor:
        return _repeat(x, self.v.shape[1] // x.shape[1])


def _repeat(x: torch.Tensor, groups: int) -> torch.Tensor:
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def _sum_groups(x: torch.Tensor, groups: int) -> torch.Tensor:
    return x if groups == 1 else x.unflatten(1, (-1, groups)).sum(dim=2)
