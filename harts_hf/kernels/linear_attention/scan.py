"""The state recurrence over the chunk tree, the reading of states and scores, and the backward of both."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from harts_hf.kernels.linear_attention.order import Level, LevelOrder
from harts_hf.kernels.linear_attention.routing import gradient_places

# Shapes: M nodes in level order, h value heads, C slots, K channels of keys, V of values.


class ChunkScan(torch.autograd.Function):
    """From the chunks' own quantities to output rows and exported states.

    For a node that starts from state ``S``::

        correction = new_values - reads @ S                      [C, V]
        output     = query @ S + scores @ correction             [C, V]
        S_out      = decay * S + writes^T @ correction           [K, V]

    Inputs: ``query`` and ``reads`` and ``writes`` ``[M, h, C, K]``, ``scores`` ``[M, h, C, C]``, ``new_values``
    ``[M, h, C, V]``, ``decay`` ``[M, h, K]`` or ``[M, h, 1]``, ``initial_states`` ``[S, h, K, V]``, a
    :class:`LevelOrder`; the tensors contiguous and of one dtype. Outputs: ``[N, h, V]`` and ``[X, h, K, V]``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        scores: torch.Tensor,
        reads: torch.Tensor,
        new_values: torch.Tensor,
        writes: torch.Tensor,
        decay: torch.Tensor,
        initial_states: torch.Tensor,
        order: LevelOrder,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        nodes, heads, _, channels = query.shape
        starts = query.new_empty(nodes, heads, channels, new_values.shape[3])
        exports = starts.new_empty(len(order.exported), *starts.shape[1:])
        corrections = torch.empty_like(new_values)
        left: torch.Tensor | None = None
        for level in order.levels:
            at = level.nodes
            if left is None:
                starts[at] = 0
                starts[order.starts] = initial_states[order.initial]
            else:
                torch.index_select(left, 0, level.parents, out=starts[at])
            start, correction = starts[at], corrections[at]
            torch.sub(new_values[at], _bmm(reads[at], start), out=correction)
            if level.num_kept == 0:
                continue
            left = _kept(start, level) * _kept(decay[at], level)[..., None]
            left += _bmm(_kept(writes[at], level).mT, _kept(correction, level))
            if len(level.exports):
                exports[level.exports] = left[level.exported]
        outputs = _bmm(query, starts) + _bmm(scores, corrections)
        ctx.save_for_backward(query, scores, reads, writes, decay, starts, corrections)
        ctx.order, ctx.num_initial = order, len(initial_states)
        return _rows(outputs, order.output_places), exports

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_rows: torch.Tensor | None, grad_exports: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        query, scores, reads, writes, decay, starts, corrections = ctx.saved_tensors
        order: LevelOrder = ctx.order
        if grad_rows is None:
            grad_rows = query.new_zeros(len(order.output_places), corrections.shape[1], corrections.shape[3])
        grad_outputs = torch.zeros_like(corrections)
        places = gradient_places(grad_rows, grad_exports, order)
        grad_outputs.transpose(1, 2)[places // order.chunk_size, places % order.chunk_size] = grad_rows
        grad_query = _bmm(grad_outputs, starts.mT)
        grad_scores = _bmm(grad_outputs, corrections.mT)
        grad_corrections = _bmm(scores.mT, grad_outputs)
        grad_starts = _bmm(query.mT, grad_outputs)
        grad_writes, grad_decay = torch.zeros_like(writes), torch.zeros_like(decay)
        below: Level | None = None  # the level that starts from this one's states
        for level in reversed(order.levels):
            at = level.nodes
            if level.num_kept:
                grad_left = starts.new_zeros(level.num_kept, *starts.shape[1:])
                if below is not None:
                    grad_left.index_add_(0, below.parents, grad_starts[below.nodes])  # children in ascending order
                if grad_exports is not None and len(level.exports):
                    grad_left.index_add_(0, level.exported, grad_exports[level.exports])
                _add_kept(grad_corrections[at], level, _bmm(_kept(writes[at], level), grad_left))
                _add_kept(grad_writes[at], level, _bmm(_kept(corrections[at], level), grad_left.mT))
                product = (grad_left * _kept(starts[at], level)).sum(dim=-1)
                _add_kept(grad_decay[at], level, product if decay.shape[2] > 1 else product.sum(-1, keepdim=True))
                _add_kept(grad_starts[at], level, grad_left * _kept(decay[at], level)[..., None])
            grad_starts[at] -= _bmm(reads[at].mT, grad_corrections[at])
            below = level
        grad_reads = -_bmm(grad_corrections, starts.mT)
        grad_initial = None
        if ctx.needs_input_grad[6]:
            grad_initial = starts.new_zeros(ctx.num_initial, *starts.shape[1:])
            grad_initial.index_add_(0, order.initial, grad_starts[order.starts])
        return (
            grad_query,
            grad_scores,
            grad_reads,
            grad_corrections,
            grad_writes,
            grad_decay,
            grad_initial,
            None,
        )


def _bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Product over the last two dimensions; always a batched one, whose rounding does not depend on the batch."""
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, a.shape[:2])


def _rows(slots: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """``[M, h, C, V]`` -> ``[N, h, V]``."""
    size = slots.shape[2]
    return slots.transpose(1, 2)[places // size, places % size]


def _kept(x: torch.Tensor, level: Level) -> torch.Tensor:
    return x if level.kept is None else x.index_select(0, level.kept)


def _add_kept(total: torch.Tensor, level: Level, part: torch.Tensor) -> None:
    if level.kept is None:
        total += part
    else:
        total[level.kept] += part  # each node once
