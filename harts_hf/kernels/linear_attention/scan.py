"""The state recurrence over the chunk tree, the reading of states and scores, and the backward of both."""

from typing import Any

import torch

from harts_hf.kernels.checks import exact_backward
from harts_hf.kernels.linear_attention.chunk import ChunkGrads, Chunks, unit_lower_inverse
from harts_hf.kernels.linear_attention.gradient_entry import gradient_positions
from harts_hf.kernels.linear_attention.order import Level, LevelOrder, positions_by_head

# Shapes: M nodes in level order, h value heads, C slots, K channels of keys, V of values. Nodes and heads are one
# dimension in the products, always batched ones, whose rounding does not depend on the batch.


class DeltaRule(torch.autograd.Function):
    """From gathered inputs ``[M, heads, C, ...]`` to output rows ``[N, h, V]`` and exported states ``[X, h, K, V]``.

    Inputs: the type of the rule's :class:`Chunks`, a :class:`LevelOrder`, ``initial_states`` ``[S, h, K, V]``, then
    the arguments of ``Chunks.build``; all of one dtype.
    """

    @staticmethod
    def forward(
        ctx: Any, rule: type[Chunks], order: LevelOrder, initial_states: torch.Tensor, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        chunks = rule.build(*inputs)
        inverse = unit_lower_inverse(chunks.system).flatten(0, 1)
        starts, corrections, exports = _run_forward(chunks, inverse, initial_states, order)
        heads = starts.shape[1]
        outputs = torch.bmm(chunks.query.flatten(0, 1), starts.flatten(0, 1))
        outputs.baddbmm_(chunks.scores.flatten(0, 1), corrections)
        ctx.save_for_backward(*chunks.tensors, inverse, starts, corrections)
        ctx.rule, ctx.order, ctx.num_initial = rule, order, len(initial_states)
        rows = outputs.flatten(0, 1).index_select(0, order.by_head(heads).output_positions)
        return rows.unflatten(0, (-1, heads)), exports

    @staticmethod
    @exact_backward
    def backward(
        ctx: Any, grad_rows: torch.Tensor | None, grad_exports: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        *tensors, inverse, starts, corrections = ctx.saved_tensors
        chunks, order = ctx.rule.of_tensors(tensors), ctx.order
        grads, grad_starts = _run_backward(chunks, inverse, starts, corrections, grad_rows, grad_exports, order)
        grad_initial = None
        if ctx.needs_input_grad[2]:
            grad_initial = starts.new_zeros(ctx.num_initial, *starts.shape[1:])
            grad_initial.index_add_(0, order.initial, grad_starts[order.starts])
        return None, None, grad_initial, *chunks.backward(grads)


def _run_forward(
    chunks: Chunks, inverse: torch.Tensor, initial_states: torch.Tensor, order: LevelOrder
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Start states ``[M, h, K, V]``, corrections ``[M h, C, V]`` and exported states."""
    nodes, (heads, *state) = order.num_nodes, initial_states.shape[1:]
    keys, values, writes = (x.flatten(0, 1) for x in (chunks.keys, chunks.values, chunks.writes))
    decay = chunks.decay.flatten(0, 1)[..., None]
    starts, exports = (values.new_empty(count, heads, *state) for count in (nodes, len(order.exported)))
    flat_starts = starts.flatten(0, 1)
    corrections = torch.empty_like(values)
    left: torch.Tensor | None = None
    for level in order.levels:
        if left is None:
            starts[level.start : level.stop] = 0
            starts[order.starts] = initial_states[order.initial]
        else:
            torch.index_select(left, 0, level.parents, out=starts[level.start : level.stop])
        at, kept = _flat_slices(level, heads)
        torch.bmm(inverse[at], values[at].baddbmm_(keys[at], flat_starts[at], alpha=-1), out=corrections[at])
        if level.num_kept:
            left = flat_starts[kept] * decay[kept]
            left.baddbmm_(writes[kept].mT, corrections[kept])
            left = left.unflatten(0, (-1, heads))
            if len(level.exports):
                exports[level.exports] = left[level.exported]
    return starts, corrections, exports


def _run_backward(
    chunks: Chunks,
    inverse: torch.Tensor,
    starts: torch.Tensor,
    corrections: torch.Tensor,
    grad_rows: torch.Tensor | None,
    grad_exports: torch.Tensor | None,
    order: LevelOrder,
) -> tuple[ChunkGrads, torch.Tensor]:
    """Gradients of what the chunks give, and of the start states."""
    nodes, heads = starts.shape[:2]
    flat_starts = starts.flatten(0, 1)
    keys, writes = chunks.keys.flatten(0, 1), chunks.writes.flatten(0, 1)
    decay = chunks.decay.flatten(0, 1)[..., None]
    grad_outputs = _position_rows(grad_rows, grad_exports, corrections, heads, order)
    grad_query = torch.bmm(grad_outputs, flat_starts.mT)
    grad_scores = torch.bmm(grad_outputs, corrections.mT)
    grad_corrections = torch.bmm(chunks.scores.flatten(0, 1).mT, grad_outputs)
    flat_grad_starts = torch.bmm(chunks.query.flatten(0, 1).mT, grad_outputs)
    grad_starts = flat_grad_starts.unflatten(0, (nodes, heads))
    grad_values = grad_outputs  # takes its memory
    grad_writes, grad_decay = torch.zeros_like(writes), torch.zeros_like(decay)
    below: Level | None = None  # the level that starts from this one's states
    for level in reversed(order.levels):
        at, kept = _flat_slices(level, heads)
        if level.num_kept:
            grad_left = starts.new_zeros(level.num_kept, *starts.shape[1:])  # of outgoing states
            if below is not None:  # children in ascending order
                grad_left.index_add_(0, below.parents, grad_starts[below.start : below.stop])
            if grad_exports is not None and len(level.exports):
                grad_left.index_add_(0, level.exported, grad_exports[level.exports])
            grad_left = grad_left.flatten(0, 1)
            grad_corrections[kept].baddbmm_(writes[kept], grad_left)
            flat_grad_starts[kept].addcmul_(grad_left, decay[kept])
            torch.bmm(corrections[kept], grad_left.mT, out=grad_writes[kept])
            grad_channels = grad_left.mul_(flat_starts[kept]).sum(dim=-1, keepdim=True)
            grad_decay[kept] = grad_channels if decay.shape[1] > 1 else grad_channels.sum(dim=1, keepdim=True)
        torch.bmm(inverse[at].mT, grad_corrections[at], out=grad_values[at])
        flat_grad_starts[at].baddbmm_(keys[at].mT, grad_values[at], alpha=-1)
        below = level
    grad_system = torch.bmm(grad_values, corrections.mT).neg_()
    grad_keys = torch.bmm(grad_values, flat_starts.mT).neg_()
    grads = (grad_query, grad_scores, grad_system, grad_keys, grad_values, grad_writes, grad_decay[..., 0])
    return ChunkGrads(*(grad.unflatten(0, (nodes, heads)) for grad in grads)), grad_starts


def _flat_slices(level: Level, heads: int) -> tuple[slice, slice]:
    """The level's nodes, and those of them that leave a state, with nodes and heads in one dimension."""
    return (
        slice(level.start * heads, level.stop * heads),
        slice(level.start * heads, level.kept_stop * heads),
    )


def _position_rows(
    grad_rows: torch.Tensor | None,
    grad_exports: torch.Tensor | None,
    like: torch.Tensor,
    heads: int,
    order: LevelOrder,
) -> torch.Tensor:
    """``[M h, C, V]``: gradients of output rows at the positions where they enter, zeros elsewhere."""
    grad = torch.zeros_like(like)
    if grad_rows is not None:
        positions = positions_by_head(gradient_positions(grad_rows, grad_exports, order), heads, order.chunk_size)
        grad.flatten(0, 1).index_copy_(0, positions.flatten(), grad_rows.flatten(0, 1))
    return grad
