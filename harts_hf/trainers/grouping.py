"""A batch of rows as one of episodes, while TRL shuffles and splits it."""

from typing import Any

import torch

from harts_hf.trainers.weighing import WEIGHTS

# Rows per episode of a batch that is grouped by episodes. It comes first: TRL sizes a batch by its first entry.
_COUNTS = "rows_of_episode"


def grouped(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch with an entry per episode: the rows of each, ``[k, ...]``."""
    if WEIGHTS not in batch:
        return batch
    counts = torch.bincount(batch["episode"])
    ends = counts.cumsum(0).tolist()
    of_each: dict[str, Any] = {}
    for key, value in batch.items():
        is_scalar = not isinstance(value, torch.Tensor | list) or (isinstance(value, torch.Tensor) and not value.ndim)
        if not is_scalar and len(value) != ends[-1]:
            raise ValueError(
                f"expected {key!r} of the batch to have {ends[-1]} entries, one per row, got {len(value)}"
            )
        starts = [0, *ends]
        of_each[key] = value if is_scalar else [value[a:b] for a, b in zip(starts, ends, strict=False)]
    return {_COUNTS: counts, **of_each}


def ungrouped(batch: dict[str, Any]) -> dict[str, Any]:
    """A slice of a grouped batch with an entry per row."""
    if _COUNTS not in batch:
        return batch
    return {
        key: _joined(value) if isinstance(value, list) else value for key, value in batch.items() if key != _COUNTS
    }


def _joined(parts: list[Any]) -> Any:
    return torch.cat(parts) if isinstance(parts[0], torch.Tensor) else [value for part in parts for value in part]
