"""The convolution as a sum over a table of ancestors."""

import torch
from torch.nn import functional as F

from harts_hf.batch import ConvTable
from harts_hf.kernels.checks import wide_dtype
from harts_hf.kernels.gather import reference as gather


def tree_causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, table: ConvTable, *, silu: bool
) -> torch.Tensor:
    """See :func:`harts_hf.kernels.conv.api.tree_causal_conv1d`."""
    dtype = wide_dtype(x, weight, bias)
    window = gather.gather_rows(x.to(dtype), table.gather).view(-1, table.width, x.shape[1])  # [N, W, D]
    y = (window * weight.to(dtype).T).sum(dim=1)
    if bias is not None:
        y = y + bias.to(dtype)
    return (F.silu(y) if silu else y).to(x.dtype)
