"""TRL's batches of labelled rows (supervised training) as the trajectories of a slice."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from harts_hf.modeling import HEAD_VALUES
from harts_hf.rollouts.supervised import IGNORED
from harts_hf.tree import IntArray


@dataclass(frozen=True, eq=False, kw_only=True)
class LabelledRows:
    """A batch of ``B`` rows of ``T`` columns, padded anywhere.

    What stands after a row's last label changes nothing and is not computed, and a row without labels takes no part,
    unless ``keeps_all``: the router's auxiliary loss and the experts' load count all tokens.

    Attributes:
        input_ids: ``[B, T]``.
        is_real: ``[B, T]`` bool, not padding.
        is_label: ``[B, T]`` bool, tokens with a loss; a row's first token is none, as nothing predicts it.
        keeps_all: whether all real tokens are computed.
    """

    input_ids: NDArray[np.int64]
    is_real: NDArray[np.bool_]
    is_label: NDArray[np.bool_]
    keeps_all: bool = False

    @classmethod
    def from_batch(cls, batch: dict[str, Any], *, keeps_all: bool = False) -> "LabelledRows":
        """From TRL's ``input_ids``, ``labels`` and ``attention_mask``, on any device.

        Raises:
            ValueError: a batch without them, labels other than the row's own tokens, or labels on padding.
        """
        missing = [name for name in ("input_ids", "labels", "attention_mask") if name not in batch]
        if missing:
            raise ValueError(
                f"expected batches with input_ids, labels and attention_mask, got none of {', '.join(missing)} "
                f"(but {', '.join(batch)})"
            )
        tensors = (batch[name] for name in ("input_ids", "labels", "attention_mask"))
        input_ids, labels, mask = (value.cpu().numpy() for value in tensors)
        if not input_ids.shape == labels.shape == mask.shape:
            raise ValueError(
                f"expected input_ids, labels and attention_mask of one shape, got {input_ids.shape}, {labels.shape} "
                f"and {mask.shape}: has each row as many labels as tokens?"
            )
        is_label, is_real = labels != IGNORED, mask != 0
        if (is_label & ~is_real).any():
            raise ValueError("expected labels -100 on padding, got others")
        other = np.argwhere(is_label & (labels != input_ids))
        if len(other):
            row, column = other[0].tolist()
            raise ValueError(
                f"expected labels to be the row's own tokens or -100, got {labels[row, column]} at token "
                f"{input_ids[row, column]} (row {row}, column {column})"
            )
        first = is_real & (is_real.cumsum(axis=1) == 1)
        return cls(input_ids=input_ids, is_real=is_real, is_label=is_label & ~first, keeps_all=keeps_all)

    def trajectories(self) -> list[IntArray]:
        """Of every row with a label, its real tokens up to the last one; or all of all rows."""
        return [self.input_ids[row][self._computed(row)] for row in self._rows()]

    def stand_in(self) -> IntArray:
        """The first row's real tokens."""
        return self.input_ids[0][self.is_real[0]]

    def index(self, paths: Sequence[IntArray]) -> dict[str, NDArray[np.int64]]:
        """``[B, T - 1]`` for each value of the head: the tree row of the label after each column; -1 for none."""
        index = np.full(self.input_ids.shape, -1, np.int64)
        for row, path in zip(self._rows(), paths, strict=True):
            index[row, self._computed(row)] = path
        return dict.fromkeys(HEAD_VALUES, np.where(self.is_label, index, -1)[:, 1:])

    @property
    def label_mask(self) -> torch.Tensor:
        """``[B, T - 1]`` bool, whether the token after each column has a loss."""
        return torch.from_numpy(self.is_label[:, 1:])

    def _rows(self) -> list[int]:
        takes_part = self.is_real if self.keeps_all else self.is_label
        return np.flatnonzero(takes_part.any(axis=1)).tolist()

    def _computed(self, row: int) -> NDArray[np.bool_]:
        if self.keeps_all:
            return self.is_real[row]
        last = int(np.flatnonzero(self.is_label[row])[-1])
        return self.is_real[row] & (np.arange(self.input_ids.shape[1]) <= last)
