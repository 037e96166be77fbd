"""Gather whose backward goes round by round: round k adds the k-th position of every row, so no two adds meet."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from harts_hf.batch import GatherIndex
from harts_hf.kernels.caching import kept_with_table
from harts_hf.kernels.checks import wide_dtype

# Below this many rows a round costs more in calls than its additions do one after another.
_SMALL_ROUND = 32

# (turn, rows, positions)
Round = tuple[int | None, torch.Tensor, torch.Tensor]


def gather_rows(x: torch.Tensor, table: GatherIndex) -> torch.Tensor:
    """See :func:`harts_hf.kernels.gather.api.gather_rows`."""
    return _GatherRows.apply(x, table)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, table: GatherIndex) -> torch.Tensor:
        ctx.table, ctx.dtype = table, x.dtype
        return take_rows(x, table.index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return sum_positions(grad, ctx.table).to(ctx.dtype), None


def take_rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``x[index]`` along the first dimension, zeros where the index is -1."""
    if x.shape[0] == 0:
        return x.new_zeros(len(index), *x.shape[1:])
    rows = x.index_select(0, index.clamp_min(0))
    missing = (index < 0).nonzero().squeeze(1)
    return rows.index_fill_(0, missing, 0) if len(missing) else rows


def sum_positions(grad: torch.Tensor, table: GatherIndex) -> torch.Tensor:
    """``[R, ...]`` in float32 or wider: for each row the sum of ``grad`` over its positions, in ascending order."""
    total: torch.Tensor | None = None
    for turn, rows, positions in rounds(table):
        part = grad.index_select(0, positions).to(wide_dtype(grad))
        if turn == 0 and len(rows) == table.num_rows:
            total = part  # every row is read, as usual
            continue
        if total is None:
            total = part.new_zeros(table.num_rows, *part.shape[1:])
        add_round_(total, turn, rows, part)
    return grad.new_zeros(table.num_rows, *grad.shape[1:], dtype=wide_dtype(grad)) if total is None else total


@kept_with_table
def rounds(table: GatherIndex) -> list[Round]:
    """Splits a table into rounds: round k holds the k-th position of every row that has one.

    When few rows have positions left, a last round of turn None holds them all, row by row in ascending order.
    """
    counts = table.ptr.diff()
    rows = counts.nonzero().squeeze(1)
    found: list[Round] = []
    while len(rows) and (not found or len(rows) >= _SMALL_ROUND):
        turn = len(found)
        found.append((turn, rows, table.positions[table.ptr[rows] + turn]))
        rows = rows[counts[rows] > turn + 1]
    if len(rows):
        left = counts[rows] - len(found)
        starts = (table.ptr[rows] + len(found)).repeat_interleave(left)
        steps = torch.arange(len(starts), device=left.device) - (left.cumsum(0) - left).repeat_interleave(left)
        found.append((None, rows.repeat_interleave(left), table.positions[starts + steps]))
    return found


def add_round_(total: torch.Tensor, turn: int | None, rows: torch.Tensor, part: torch.Tensor) -> None:
    """Adds a round's ``part`` to the ``rows`` of ``total``, which is zero before the first round."""
    if turn is None:
        total.index_add_(0, rows, part)  # on the CPU one add after another, in the order given
    else:
        total[rows] = part if turn == 0 else total.index_select(0, rows) + part
