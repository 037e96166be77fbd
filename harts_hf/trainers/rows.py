"""TRL's padded rows as trajectories of a window, and values per tree row back in TRL's shape."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from harts_hf.runtime import TreeWindow
from harts_hf.trainers.collator import TreeDataCollator
from harts_hf.tree import IntArray


@dataclass(frozen=True, eq=False, kw_only=True)
class PaddedRows:
    """One TRL batch of ``B`` rows, left-padded prompts and right-padded completions of ``C`` columns.

    Attributes:
        input_ids: ``[B, P + C]``.
        attention_mask: ``[B, P + C]``, 1 on real tokens; 0 on all completion columns of a row that is left out.
        num_scored: C.
    """

    input_ids: NDArray[np.int64]
    attention_mask: NDArray[np.int64]
    num_scored: int

    @classmethod
    def from_tensors(cls, input_ids: torch.Tensor, attention_mask: torch.Tensor, num_scored: int) -> "PaddedRows":
        """From TRL's tensors, on any device.

        Raises:
            ValueError: a row with scored tokens but no prompt (nothing would predict its first token).
        """
        rows = cls(
            input_ids=input_ids.cpu().numpy(), attention_mask=attention_mask.cpu().numpy(), num_scored=num_scored
        )
        empty = np.flatnonzero(rows.is_scored & ~rows.attention_mask[:, :-num_scored].any(axis=1))
        if empty.size:
            raise ValueError(f"expected prompts of at least one token, got an empty one in row {empty[0]}")
        return rows

    @property
    def is_scored(self) -> Any:
        """``[B]`` whether a row has a token to score."""
        return self.attention_mask[:, -self.num_scored :].any(axis=1)

    def tokens(self, row: int) -> IntArray:
        """The real tokens of a row."""
        return self.input_ids[row][self.attention_mask[row] != 0]


def plan_rows(slices: Sequence[PaddedRows], collator: TreeDataCollator) -> tuple[TreeWindow, list[NDArray[np.int64]]]:
    """Plans all rows of an update as one window.

    Rows without a token to score (truncated ones that TRL masks) take no part; if no row has any, the first one's
    real tokens stand in, so that every parameter still gets its zero gradient.

    Returns:
        The window, and for each slice ``[B, C]`` the tree row whose token a column holds; -1 where nothing is scored.
    """
    scored = [(number, row) for number, rows in enumerate(slices) for row in np.flatnonzero(rows.is_scored).tolist()]
    taking_part = scored or [(0, 0)]
    window = collator([slices[number].tokens(row) for number, row in taking_part])
    indices = [np.full((len(rows.input_ids), rows.num_scored), -1, np.int64) for rows in slices]
    for trajectory, (number, row) in enumerate(scored):
        mask = slices[number].attention_mask[row] != 0
        in_completion = mask[-slices[number].num_scored :]
        path = window.tree.path(trajectory)
        indices[number][row, in_completion] = path[len(path) - int(in_completion.sum()) :]
    return window, indices


def spread(values: torch.Tensor, index: NDArray[np.int64]) -> torch.Tensor:
    """Values per tree row ``[N]`` in TRL's shape ``[B, C]``, 0 where nothing is scored."""
    places = torch.from_numpy(index).to(values.device)
    return values[places.clamp(min=0)].masked_fill(places < 0, 0)


def collect(
    gradients: Sequence[torch.Tensor | None], indices: Sequence[NDArray[np.int64]], num_rows: int
) -> torch.Tensor:
    """Sums gradients in TRL's shape over the trajectories that share a tree row.

    Sums in float64 on the CPU, in the order of the slices: a few numbers per token, and no atomics.

    Returns:
        ``[num_rows]`` float64 on the CPU.
    """
    total = np.zeros(num_rows)
    for gradient, index in zip(gradients, indices, strict=True):
        if gradient is not None:
            scored = index >= 0
            weights = gradient.double().cpu().numpy()[scored]
            total += np.bincount(index[scored], weights=weights, minlength=num_rows)
    return torch.from_numpy(total)
