"""What both rules share within a chunk."""

from typing import NamedTuple

import torch


class ChunkParts(NamedTuple):
    """The inputs of :class:`~harts_hf.kernels.linear_attention.scan.ChunkScan`, in its order."""

    query: torch.Tensor
    scores: torch.Tensor
    reads: torch.Tensor
    new_values: torch.Tensor
    writes: torch.Tensor
    decay: torch.Tensor


def solve_chunk(system: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``(I + strictly lower part of system)^-1`` times ``keys`` and ``values`` (the UT transform, arXiv 2406.06484).

    Args:
        system: ``[M, h, C, C]``, its diagonal and what is above are not read.
        keys: ``[M, h, C, K]``.
        values: ``[M, h, C, V]``.
    """
    both = torch.linalg.solve_triangular(system, torch.cat([keys, values], dim=-1), upper=False, unitriangular=True)
    return both[..., : keys.shape[-1]], both[..., keys.shape[-1] :]
