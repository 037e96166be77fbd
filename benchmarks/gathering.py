"""What the ranks of a benchmark tell one another."""

from typing import Any

import torch


def of_ranks(values: Any) -> list[Any]:
    """What every rank has; a collective."""
    if not torch.distributed.is_initialized():
        return [values]
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, values)
    return found
