"""What both rules share within a chunk."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import NamedTuple, Self

import torch

# Diagonal blocks up to this size are inverted by substitution, larger ones by products of their halves.
_SUBSTITUTION_BLOCK = 16


@dataclass(frozen=True, eq=False, kw_only=True)
class Chunks(ABC):
    """What a rule computes of each chunk without knowing its start state, for ``M`` nodes and ``h`` value heads.

    A node that starts from state ``S`` then has (UT transform, arXiv 2406.06484)::

        (I + system) correction = values - keys @ S
        output = query @ S + scores @ correction
        S_out  = decay * S + writes^T @ correction

    The fields are what the backward needs. What an element-wise product gives is not among them but computed again
    when it is read: fresh memory costs more.

    Attributes:
        q, k: ``[M, H, C, K]``; a q/k head serves ``h / H`` consecutive value heads.
        v: ``[M, h, C, V]``.
        beta: ``[M, h, C]``.
        until: decay from the chunk's start to each slot, ``[M, h, C]`` or, of each channel, ``[M, h, C, K]``.
        scores: ``[M, h, C, C]`` decayed products of q with k, lower triangular.
        key_scores: ``[M, h, C, C]`` decayed products of k with k, lower triangular.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor
    until: torch.Tensor
    scores: torch.Tensor
    key_scores: torch.Tensor

    @classmethod
    @abstractmethod
    def build(cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> Self:
        """From the gathered inputs."""

    @abstractmethod
    def backward(self, grads: "ChunkGrads") -> tuple[torch.Tensor, ...]:
        """Gradients of the arguments of :meth:`build`. Writes over ``grads``."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The fields, in order."""
        return tuple(getattr(self, field.name) for field in fields(self))

    @classmethod
    def of_tensors(cls, tensors: Iterable[torch.Tensor]) -> Self:
        """From :attr:`tensors`."""
        return cls(**dict(zip((field.name for field in fields(cls)), tensors, strict=True)))

    @property
    @abstractmethod
    def query(self) -> torch.Tensor:
        """``[M, h, C, K]`` queries that read the start state."""

    @property
    @abstractmethod
    def keys(self) -> torch.Tensor:
        """``[M, h, C, K]`` keys that read what the start state knows of the values already."""

    @property
    @abstractmethod
    def writes(self) -> torch.Tensor:
        """``[M, h, C, K]`` keys by which the corrections enter the outgoing state."""

    @property
    @abstractmethod
    def decay(self) -> torch.Tensor:
        """``[M, h, K]`` of the start state over the chunk, or ``[M, h, 1]``: one for all channels."""

    @property
    def system(self) -> torch.Tensor:
        """``[M, h, C, C]`` how corrections depend on those before; only what stands below the diagonal counts."""
        return self.key_scores * self.beta[..., None]

    @property
    def values(self) -> torch.Tensor:
        """``[M, h, C, V]`` to be remembered."""
        return self.v * self.beta[..., None]


class ChunkGrads(NamedTuple):
    """Gradients of what :class:`Chunks` gives; that of ``system`` holds anything on and above the diagonal."""

    query: torch.Tensor
    scores: torch.Tensor
    system: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    writes: torch.Tensor
    decay: torch.Tensor


def unit_lower_inverse(strict: torch.Tensor) -> torch.Tensor:
    """``(I + strict)^-1`` for ``[M, h, C, C]``, of which only what stands below the diagonal is read.

    Small diagonal blocks by substitution; then ``[[A, 0], [B, D]]^-1 = [[A', 0], [-D' B A', D']]`` for blocks of twice
    the size, and so on: a third of the time of substitution over the whole chunk.
    """
    size = block = strict.shape[-1]
    while block % 2 == 0 and block > _SUBSTITUTION_BLOCK:
        block //= 2
    inverse = torch.zeros_like(strict)
    ones = torch.eye(block, dtype=strict.dtype, device=strict.device)
    diagonal = diagonal_blocks(strict, block).contiguous()
    diagonal_blocks(inverse, block).copy_(
        torch.linalg.solve_triangular(diagonal, ones.expand_as(diagonal), upper=False, unitriangular=True)
    )
    while block < size:
        below = diagonal_blocks(strict, 2 * block)[..., block:, :block]
        blocks = diagonal_blocks(inverse, 2 * block)
        product = block_bmm(block_bmm(blocks[..., block:, block:], below), blocks[..., :block, :block])
        blocks[..., block:, :block] = product.neg_()
        block *= 2
    return inverse


def diagonal_blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    """The view ``[..., n, block, block]`` of the diagonal blocks of ``[..., C, C]``."""
    blocks = x.unflatten(-2, (-1, block)).unflatten(-1, (-1, block))
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Product over the last two of four dimensions; a batched one, whose rounding does not depend on the batch."""
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, a.shape[:2])


def add_bmm_(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Adds :func:`bmm` to a contiguous tensor."""
    total.flatten(0, 1).baddbmm_(a.flatten(0, 1), b.flatten(0, 1))


def dot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Row by row products over the last dimension."""
    return (x * y).sum(dim=-1)


def block_bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Products of matrices with three dimensions before them."""
    return torch.bmm(a.flatten(0, 2), b.flatten(0, 2)).unflatten(0, a.shape[:3])
