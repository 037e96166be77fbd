"""Sketches of tensors: small enough to keep, and compared in place of what they are of.

A sketch adds entries up, each with a random sign, in a few buckets. The squared difference of two sketches is an
unbiased estimate of that of the tensors (Charikar, Chen and Farach-Colton, 2002: the count sketch), whose relative
error shrinks with the number of buckets and of tensors. Sketches are linear.
"""

import torch
from torch import nn

_PIECE = 2**24  # entries whose signs are drawn at a time


def sketch_of(tensor: torch.Tensor, *, buckets: int, seed: int) -> torch.Tensor:
    """``[buckets]`` float64, on the CPU; the same signs for the same seed, size and kind of device.

    Args:
        tensor: of any shape and floating dtype, on any device.
        buckets: how many sums are kept.
        seed: of the signs; another one for each tensor that is compared together with others.
    """
    total = torch.zeros(buckets, dtype=torch.float64, device=tensor.device)
    generator = torch.Generator(tensor.device).manual_seed(seed)
    for piece in tensor.detach().flatten().split(_PIECE):
        signs = torch.randint(0, 2, piece.shape, generator=generator, device=piece.device, dtype=torch.int8)
        signed = torch.where(signs.bool(), piece, -piece).float()
        padded = nn.functional.pad(signed, (0, -len(signed) % buckets))
        total += padded.view(-1, buckets).sum(0, dtype=torch.float64)
    return total.cpu()
