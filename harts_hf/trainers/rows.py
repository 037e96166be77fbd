"""TRL's padded rows as the trajectories of a slice."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from harts_hf.modeling import LABEL_VALUES
from harts_hf.runtime.routes import TokenRoutes
from harts_hf.tree import IntArray

# Entry of a batch: for each row its routes as lists of tensors (TokenRoutes.plain), or None.
ROUTES = "routes"
# Entries that no loss of TRL's reads.
PROMPTS = ("prompt_ids", "prompt_mask")


@dataclass(frozen=True, eq=False, kw_only=True)
class PaddedRows:
    """One TRL batch of ``B`` rows, left-padded prompts and right-padded completions of ``C`` columns.

    Rows without a token to score (truncated ones that TRL masks) take no part, unless ``keeps_all``: the router's
    auxiliary loss and the experts' load count their prompts.

    Attributes:
        prompt_ids: ``[B, P]``.
        prompt_mask: ``[B, P]``, not 0 on real tokens.
        completion_ids: ``[B, C]``.
        completion_mask: ``[B, C]``, not 0 on real tokens; 0 on all columns of a row that is left out.
        keeps_all: whether rows without a token to score take part.
        routes_of_rows: ``[B]`` experts of each row's first tokens that are known before; None for none.
    """

    prompt_ids: NDArray[np.int64]
    prompt_mask: NDArray[np.int64]
    completion_ids: NDArray[np.int64]
    completion_mask: NDArray[np.int64]
    keeps_all: bool = False
    routes_of_rows: Sequence[TokenRoutes | None] | None = None

    @classmethod
    def from_tensors(
        cls, input_ids: torch.Tensor, attention_mask: torch.Tensor, num_scored: int, *, keeps_all: bool = False
    ) -> "PaddedRows":
        """From TRL's tensors ``[B, P + C]``, on any device, of which ``num_scored`` columns are completions.

        Raises:
            ValueError: a row with scored tokens but no prompt (nothing would predict its first token).
        """
        ids, mask = input_ids.cpu().numpy(), attention_mask.cpu().numpy()
        start = ids.shape[1] - num_scored
        return cls._checked(ids[:, :start], mask[:, :start], ids[:, start:], mask[:, start:], keeps_all)

    @classmethod
    def from_batch(cls, batch: dict[str, Any], *, keeps_all: bool = False) -> "PaddedRows":
        """From a batch of TRL's; errors as in :meth:`from_tensors`."""
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        prompt_ids, prompt_mask, ids, mask = (batch[name].cpu().numpy() for name in names)
        return cls._checked(prompt_ids, prompt_mask, ids, mask, keeps_all)

    @classmethod
    def _checked(
        cls, prompt_ids: Any, prompt_mask: Any, completion_ids: Any, completion_mask: Any, keeps_all: bool
    ) -> "PaddedRows":
        rows = cls(
            prompt_ids=prompt_ids,
            prompt_mask=prompt_mask,
            completion_ids=completion_ids,
            completion_mask=completion_mask,
            keeps_all=keeps_all,
        )
        empty = np.flatnonzero(rows.is_scored & (np.count_nonzero(prompt_mask, axis=1) == 0))
        if empty.size:
            raise ValueError(f"expected prompts of at least one token, got an empty one in row {empty[0]}")
        return rows

    @property
    def is_scored(self) -> Any:
        """``[B]`` whether a row has a token to score."""
        return self._counts > 0

    @cached_property
    def _counts(self) -> Any:
        """``[B]`` tokens of each completion."""
        return np.count_nonzero(self.completion_mask, axis=1)  # an ``any`` of integers takes ten times as long

    def tokens(self, row: int) -> IntArray:
        """The real tokens of a row."""
        prompt = _real(self.prompt_ids[row], self.prompt_mask[row])
        return np.concatenate([prompt, _real(self.completion_ids[row], self.completion_mask[row])])

    def trajectories(self) -> list[IntArray]:
        """The real tokens of every row that takes part."""
        return [self.tokens(row) for row in self._rows()]

    def with_routes(self, routes: Sequence[TokenRoutes | None] | None) -> "PaddedRows":
        """The same with routes of each row."""
        return replace(self, routes_of_rows=routes)

    def with_routes_of(self, batch: dict[str, Any]) -> "PaddedRows":
        """The same with those that a batch of these rows holds, if it does."""
        plain = batch.get(ROUTES)
        return self if plain is None else self.with_routes([one and TokenRoutes.from_plain(one) for one in plain])

    @property
    def routes(self) -> list[TokenRoutes | None] | None:
        """Of each of :meth:`trajectories`; None where none are known."""
        return None if self.routes_of_rows is None else [self.routes_of_rows[row] for row in self._rows()]

    def by_row(self, routes: Sequence[TokenRoutes]) -> list[TokenRoutes | None]:
        """``[B]`` what :meth:`trajectories` have; None for rows that take no part."""
        found: list[TokenRoutes | None] = [None] * len(self.is_scored)
        for row, of_row in zip(self._rows(), routes, strict=True):
            found[row] = of_row
        return found

    def stand_in(self) -> IntArray:
        """The first row's real tokens."""
        return self.tokens(0)

    def index(self, paths: Sequence[IntArray]) -> dict[str, NDArray[np.int64]]:
        """``[B, C]``, for log-probs and entropies alike, the tree row whose token a column holds; -1 for none."""
        index = np.full(self.completion_ids.shape, -1, np.int64)
        counts = self._counts.tolist()
        for row, path in zip(self._rows(), paths, strict=True):
            mask, count = self.completion_mask[row], counts[row]
            is_first = np.count_nonzero(mask[:count]) == count  # padding behind alone, as TRL has it
            index[row, slice(count) if is_first else mask != 0] = path[len(path) - count :]
        return dict.fromkeys(LABEL_VALUES, index)

    def _rows(self) -> list[int]:
        takes_part = self.is_scored
        if self.keeps_all:
            takes_part = takes_part | self.prompt_mask.any(axis=1)
        return np.flatnonzero(takes_part).tolist()


def _real(ids: IntArray, mask: IntArray) -> IntArray:
    """``[L]`` the ids where a mask is not 0: a view where padding stands on one side only."""
    count = np.count_nonzero(mask)
    if np.count_nonzero(mask[len(mask) - count :]) == count:
        return ids[len(ids) - count :]
    return ids[:count] if np.count_nonzero(mask[:count]) == count else ids[mask != 0]


def token_ids(batch: dict[str, Any]) -> torch.Tensor:
    """``[B, P + C]`` token ids of a batch of TRL's."""
    return torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)


def without_prompts(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch of TRL's with prompts of one column, as far as it has prompts: a step's are mostly their padding."""
    shortened: dict[str, Any] = {n: batch[n][:, -1:] for n in PROMPTS if n in batch}
    return {**batch, **shortened}
