"""Where the gradient of an output row enters the chunk tree.

Rows before a branch are in the chunk of every branch, with equal outputs, and the gradient of such a row may enter
through any of the copies. Which one decides the rounding: if a trajectory's gradient entered partly through another
branch's chunk, its sums would be split where the trajectory alone does not split them. So it enters through the first
copy that reaches as deep in the chunk as any gradient does.
"""

import torch

from harts_hf.kernels.linear_attention.order import LevelOrder


def gradient_positions(grad: torch.Tensor, grad_states: torch.Tensor | None, order: LevelOrder) -> torch.Tensor:
    """The position ``node * C + slot`` for the gradient of each own row.

    Args:
        grad: ``[N, HV, V]`` of the outputs.
        grad_states: ``[X, HV, K, V]`` of the exported states, None for zeros.
        order: the tables.

    Returns:
        ``[N]`` int64.
    """
    gather, size = order.gather, order.chunk_size
    first_own = gather.num_rows - len(grad)
    if len(gather.positions) == gather.num_rows:
        return order.output_positions  # no row has two copies
    row_is_active = grad.new_zeros(gather.num_rows + 1, dtype=torch.bool)  # the last entry stands for empty slots
    row_is_active[first_own:-1] = (grad != 0).flatten(1).any(dim=1)
    slots = torch.arange(1, size + 1, device=grad.device)
    reach = (row_is_active[gather.index].view(-1, size) * slots).amax(dim=1)  # [M] slots up to the last active one
    reach[_passes_gradient(reach > 0, grad_states, order)] = size + 1
    # Of each row's positions, ascending in `gather.positions`, the first of the largest reach.
    row = torch.arange(gather.num_rows, device=grad.device).repeat_interleave(gather.ptr.diff())
    reach_of_position = reach[gather.positions // size]
    largest = reach.new_zeros(gather.num_rows).scatter_reduce_(0, row, reach_of_position, "amax")
    candidates = torch.where(reach_of_position == largest[row], gather.positions, order.num_nodes * size)
    best = torch.full_like(largest, order.num_nodes * size).scatter_reduce_(0, row, candidates, "amin")
    return best[first_own:]


def _passes_gradient(
    node_is_active: torch.Tensor, grad_states: torch.Tensor | None, order: LevelOrder
) -> torch.Tensor:
    """``[M]`` bool: whether the gradient of a node's outgoing state can be other than zero."""
    passes = torch.zeros_like(node_is_active)
    if grad_states is not None:
        passes[order.exported[(grad_states != 0).flatten(1).any(dim=1)]] = True
    for level in reversed(order.levels[1:]):
        nodes = slice(level.start, level.stop)
        passes[order.parent[nodes][node_is_active[nodes] | passes[nodes]]] = True
    return passes
