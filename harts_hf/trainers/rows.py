"""TRL's padded rows as the trajectories of a slice."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from harts_hf.modeling import LABEL_VALUES
from harts_hf.runtime.routes import TokenRoutes
from harts_hf.tree import IntArray

# Entry of a batch: for each row its routes as lists of tensors (TokenRoutes.plain), or None.
ROUTES = "routes"


@dataclass(frozen=True, eq=False, kw_only=True)
class PaddedRows:
    """One TRL batch of ``B`` rows, left-padded prompts and right-padded completions of ``C`` columns.

    Rows without a token to score (truncated ones that TRL masks) take no part, unless ``keeps_all``: the router's
    auxiliary loss and the experts' load count their prompts.

    Attributes:
        input_ids: ``[B, P + C]``.
        attention_mask: ``[B, P + C]``, 1 on real tokens; 0 on all completion columns of a row that is left out.
        num_scored: C.
        keeps_all: whether rows without a token to score take part.
        routes_of_rows: ``[B]`` experts of each row's first tokens that are known before; None for none.
    """

    input_ids: NDArray[np.int64]
    attention_mask: NDArray[np.int64]
    num_scored: int
    keeps_all: bool = False
    routes_of_rows: Sequence[TokenRoutes | None] | None = None

    @classmethod
    def from_tensors(
        cls, input_ids: torch.Tensor, attention_mask: torch.Tensor, num_scored: int, *, keeps_all: bool = False
    ) -> "PaddedRows":
        """From TRL's tensors, on any device.

        Raises:
            ValueError: a row with scored tokens but no prompt (nothing would predict its first token).
        """
        rows = cls(
            input_ids=input_ids.cpu().numpy(),
            attention_mask=attention_mask.cpu().numpy(),
            num_scored=num_scored,
            keeps_all=keeps_all,
        )
        empty = np.flatnonzero(rows.is_scored & ~rows.attention_mask[:, :-num_scored].any(axis=1))
        if empty.size:
            raise ValueError(f"expected prompts of at least one token, got an empty one in row {empty[0]}")
        return rows

    @classmethod
    def from_batch(cls, batch: dict[str, Any], *, keeps_all: bool = False) -> "PaddedRows":
        """From a batch of TRL's; errors as in :meth:`from_tensors`."""
        masks = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        return cls.from_tensors(token_ids(batch), masks, batch["completion_ids"].shape[1], keeps_all=keeps_all)

    @property
    def is_scored(self) -> Any:
        """``[B]`` whether a row has a token to score."""
        return self.attention_mask[:, -self.num_scored :].any(axis=1)

    def tokens(self, row: int) -> IntArray:
        """The real tokens of a row."""
        return self.input_ids[row][self.attention_mask[row] != 0]

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
        index = np.full((len(self.input_ids), self.num_scored), -1, np.int64)
        for row, path in zip(self._rows(), paths, strict=True):
            in_completion = self.attention_mask[row, -self.num_scored :] != 0
            index[row, in_completion] = path[len(path) - int(in_completion.sum()) :]
        return dict.fromkeys(LABEL_VALUES, index)

    def _rows(self) -> list[int]:
        takes_part = self.attention_mask.any(axis=1) if self.keeps_all else self.is_scored
        return np.flatnonzero(takes_part).tolist()


def token_ids(batch: dict[str, Any]) -> torch.Tensor:
    """``[B, P + C]`` token ids of a batch of TRL's."""
    return torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
