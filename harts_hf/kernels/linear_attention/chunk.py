"""What both rules share within a chunk."""

from typing import NamedTuple

import torch

# Diagonal blocks up to this size are inverted by substitution, larger ones by products of their halves.
_SUBSTITUTION_BLOCK = 16


class ChunkParts(NamedTuple):
    """The inputs of :class:`~harts_hf.kernels.linear_attention.scan.ChunkScan`, in its order."""

    query: torch.Tensor
    scores: torch.Tensor
    reads: torch.Tensor
    new_values: torch.Tensor
    writes: torch.Tensor
    decay: torch.Tensor


def solve_backward(
    inverse: torch.Tensor,
    reads: torch.Tensor,
    new_values: torch.Tensor,
    grad_reads: torch.Tensor,
    grad_new_values: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Backward of ``reads = (I + system)^-1 keys`` and ``new_values = (I + system)^-1 values`` (UT transform, arXiv
    2406.06484): gradients of system (strictly lower triangular), keys and values.
    """
    grad_keys, grad_values = bmm(inverse.mT, grad_reads), bmm(inverse.mT, grad_new_values)
    grad_system = bmm(grad_keys, reads.mT)
    grad_system += bmm(grad_values, new_values.mT)
    return grad_system.neg_().tril_(-1), grad_keys, grad_values


def unit_lower_inverse(strict: torch.Tensor) -> torch.Tensor:
    """``(I + strict)^-1`` for strictly lower triangular ``[M, h, C, C]``.

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
        product = _block_bmm(_block_bmm(blocks[..., block:, block:], below), blocks[..., :block, :block])
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


def dot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Row by row products over the last dimension."""
    return (x * y).sum(dim=-1)


def _block_bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.bmm(a.flatten(0, 2), b.flatten(0, 2)).unflatten(0, a.shape[:3])
