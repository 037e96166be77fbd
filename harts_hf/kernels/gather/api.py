"""Reading rows by index, with a backward that sums in a fixed order."""

import torch

from harts_hf.batch import GatherIndex
from harts_hf.kernels.checks import check_floating, check_same_device, choose_backend
from harts_hf.kernels.gather import reference
from harts_hf.kernels.gather import torch as torch_backend

_BY_DEVICE = {"cpu": "torch", "cuda": "triton"}


def gather_rows(x: torch.Tensor, table: GatherIndex, *, backend: str | None = None) -> torch.Tensor:
    """Rows of ``x`` at ``table.index``; -1 reads zeros.

    The backward adds the gradients of the positions that read a row, in ascending order, in float32 (or
    ``x.dtype`` if wider), and rounds the sum to ``x.dtype`` once. It is deterministic.

    Args:
        x: ``[R, ...]`` floating point.
        table: ``P`` positions over ``R`` rows.
        backend: "torch", "triton" or "reference"; None chooses by device.

    Returns:
        ``[P, ...]``, dtype of ``x``.

    Raises:
        ValueError: another number of rows than the table's, a dtype that is not floating point, tensors on different
            devices, or a backend that is unknown or cannot run here.
    """
    check_floating(x=x)
    if x.dim() == 0 or x.shape[0] != table.num_rows:
        raise ValueError(f"expected x with {table.num_rows} rows, got shape {list(x.shape)}")
    check_same_device(x=x, index=table.index, positions=table.positions)
    chosen = choose_backend("gather_rows", backend, x.device, by_device=_BY_DEVICE, dtype=x.dtype)
    if chosen == "triton":
        from harts_hf.kernels.gather import triton as triton_backend

        return triton_backend.gather_rows(x, table)
    run = reference.gather_rows if chosen == "reference" else torch_backend.gather_rows
    return run(x, table)
