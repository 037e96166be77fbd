"""The state recurrence over the chunk tree, the reading of states and scores, and the backward of both."""

from typing import Any

import torch

from harts_hf.kernels.checks import exact_backward
from harts_hf.kernels.linear_attention.order import Level, LevelOrder
from harts_hf.kernels.linear_attention.routing import gradient_places

# Shapes: M nodes in level order, h value heads, C slots, K channels of keys, V of values. Nodes and heads are one
# dimension in the products, always batched ones, whose rounding does not depend on the batch.


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
        nodes, heads, size, dim_v = new_values.shape
        query, scores, reads, new_values, writes = (
            x.flatten(0, 1) for x in (query, scores, reads, new_values, writes)
        )
        decay = decay.flatten(0, 1)[..., None]
        starts = query.new_empty(nodes, heads, query.shape[2], dim_v)
        exports = starts.new_empty(len(order.exported), *starts.shape[1:])
        corrections = torch.empty_like(new_values)
        flat_starts = starts.flatten(0, 1)
        left: torch.Tensor | None = None
        for level in order.levels:
            if left is None:
                starts[level.start : level.stop] = 0
                starts[order.starts] = initial_states[order.initial]
            else:
                torch.index_select(left, 0, level.parents, out=starts[level.start : level.stop])
            at, kept = _flat_slices(level, heads)
            torch.baddbmm(new_values[at], reads[at], flat_starts[at], alpha=-1, out=corrections[at])
            if level.num_kept:
                left = flat_starts[kept] * decay[kept]
                left.baddbmm_(writes[kept].mT, corrections[kept])
                left = left.unflatten(0, (-1, heads))
                if len(level.exports):
                    exports[level.exports] = left[level.exported]
        outputs = torch.bmm(query, flat_starts).baddbmm_(scores, corrections).view(nodes, heads, size, dim_v)
        ctx.save_for_backward(query, scores, reads, writes, decay, starts, corrections)
        ctx.order, ctx.num_initial = order, len(initial_states)
        places = order.output_places
        return outputs.transpose(1, 2)[places // size, places % size], exports

    @staticmethod
    @exact_backward
    def backward(
        ctx: Any, grad_rows: torch.Tensor | None, grad_exports: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        query, scores, reads, writes, decay, starts, corrections = ctx.saved_tensors
        order: LevelOrder = ctx.order
        nodes, heads = starts.shape[:2]
        flat_starts = starts.flatten(0, 1)
        grad_outputs = _place_rows(grad_rows, grad_exports, corrections.unflatten(0, (nodes, heads)), order)
        grad_query = torch.bmm(grad_outputs, flat_starts.mT)
        grad_scores = torch.bmm(grad_outputs, corrections.mT)
        grad_corrections = torch.bmm(scores.mT, grad_outputs)
        flat_grad_starts = torch.bmm(query.mT, grad_outputs)
        grad_starts = flat_grad_starts.unflatten(0, (nodes, heads))
        grad_left = torch.zeros_like(starts)  # of outgoing states
        flat_grad_left = grad_left.flatten(0, 1)
        below: Level | None = None  # the level that starts from this one's states
        for level in reversed(order.levels):
            at, kept = _flat_slices(level, heads)
            if level.num_kept:
                mine = grad_left[level.start : level.kept_stop]
                if below is not None:  # children in ascending order
                    mine.index_add_(0, below.parents, grad_starts[below.start : below.stop])
                if grad_exports is not None and len(level.exports):
                    mine.index_add_(0, level.exported, grad_exports[level.exports])
                grad_corrections[kept].baddbmm_(writes[kept], flat_grad_left[kept])
                flat_grad_starts[kept].addcmul_(flat_grad_left[kept], decay[kept])
            flat_grad_starts[at].baddbmm_(reads[at].mT, grad_corrections[at], alpha=-1)
            below = level
        grad_reads = torch.bmm(grad_corrections, flat_starts.mT).neg_()
        grad_writes = torch.bmm(corrections, flat_grad_left.mT)
        grad_decay = flat_grad_left.mul_(flat_starts).sum(dim=-1)
        if decay.shape[1] == 1:
            grad_decay = grad_decay.sum(dim=-1, keepdim=True)
        grad_initial = None
        if ctx.needs_input_grad[6]:
            grad_initial = starts.new_zeros(ctx.num_initial, *starts.shape[1:])
            grad_initial.index_add_(0, order.initial, grad_starts[order.starts])
        parts = (grad_query, grad_scores, grad_reads, grad_corrections, grad_writes, grad_decay)
        return *(part.unflatten(0, (nodes, heads)) for part in parts), grad_initial, None


def _flat_slices(level: Level, heads: int) -> tuple[slice, slice]:
    """The level's nodes, and those of them that leave a state, with nodes and heads in one dimension."""
    return (
        slice(level.start * heads, level.stop * heads),
        slice(level.start * heads, level.kept_stop * heads),
    )


def _place_rows(
    grad_rows: torch.Tensor | None, grad_exports: torch.Tensor | None, like: torch.Tensor, order: LevelOrder
) -> torch.Tensor:
    """``[M h, C, V]``: gradients of output rows at the places where they enter, zeros elsewhere."""
    grad = torch.zeros_like(like)
    if grad_rows is not None:
        places = gradient_places(grad_rows, grad_exports, order)
        grad.transpose(1, 2)[places // order.chunk_size, places % order.chunk_size] = grad_rows
    return grad.flatten(0, 1)
