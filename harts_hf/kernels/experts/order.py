"""Which row of an expert belongs to which token."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Order:
    """The ``S = N * k`` choices of experts, sorted by expert.

    Attributes:
        choices: ``[S]`` int64: row ``s`` is choice ``choices[s] % k`` of token ``choices[s] // k``.
        rows: ``[N, k]`` int32, the inverse: the row of each choice.
        ends: ``[E]`` int32: where each expert's rows end.
        count: k.
    """

    choices: torch.Tensor
    rows: torch.Tensor
    ends: torch.Tensor
    count: int


def order_by_expert(experts: torch.Tensor, num_experts: int) -> Order:
    """Sorts choices by expert, those of an expert in the order of tokens.

    Args:
        experts: ``[N, k]`` integers in ``[0, num_experts)``.
        num_experts: E.
    """
    # A radix sort goes over the bits of its keys: one pass over bytes, eight over int64.
    keys = experts.reshape(-1).to(torch.uint8 if num_experts <= 256 else torch.int16)
    ordered, choices = torch.sort(keys, stable=True)
    bounds = torch.arange(num_experts, dtype=keys.dtype, device=keys.device)
    ends = torch.searchsorted(ordered, bounds, right=True, out_int32=True)
    rows = torch.empty(choices.shape, dtype=torch.int32, device=keys.device)
    rows[choices] = torch.arange(len(choices), dtype=torch.int32, device=keys.device)
    return Order(choices, rows.view(experts.shape), ends, experts.shape[1])
