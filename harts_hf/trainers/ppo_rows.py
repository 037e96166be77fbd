"""TRL's padded rows with the value of each state: before every token, and after the last one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from harts_hf.modeling import ENTROPY, LOG_PROB
from harts_hf.runtime.routes import TokenRoutes
from harts_hf.trainers.rows import PaddedRows, token_ids
from harts_hf.trainers.value_head import VALUE
from harts_hf.tree import IntArray

# Entry of a batch: [B, C] bool, the tokens that are trained.
IS_TRAINED = "is_trained"


@dataclass(frozen=True, eq=False, kw_only=True)
class ValuedRows:
    """A batch of ``B`` rows with completions of ``C`` columns; B may be 0.

    Attributes:
        rows: TRL's.
        otherwise: ``[L]`` tokens that are run if no row is scored.
    """

    rows: PaddedRows
    otherwise: IntArray

    @classmethod
    def from_batch(cls, batch: Mapping[str, Any], *, otherwise: IntArray) -> "ValuedRows":
        """Of a batch with :data:`IS_TRAINED`: each row up to its last trained token, since nothing after it counts."""
        trained = batch[IS_TRAINED]
        up_to_last = trained.flip(1).long().cumsum(1).flip(1) > 0
        mask = torch.cat([batch["prompt_mask"], up_to_last.to(batch["prompt_mask"])], dim=1)
        rows = PaddedRows.from_tensors(token_ids(dict(batch)), mask, trained.shape[1])
        return cls(rows=rows.with_routes_of(dict(batch)), otherwise=otherwise)

    @property
    def routes(self) -> list[TokenRoutes | None] | None:
        """Of each of :meth:`trajectories`, the experts that are known before; None where none are."""
        return self.rows.routes

    def trajectories(self) -> list[IntArray]:
        """The real tokens of every row with a token to score."""
        return self.rows.trajectories()

    def stand_in(self) -> IntArray:
        """What is run if no row is scored."""
        return self.otherwise

    def index(self, paths: Sequence[IntArray]) -> dict[str, NDArray[np.int64]]:
        """Rows of the tree, -1 for none: ``[B, C]`` the token of each column, for log-probs and entropies;
        ``[B, C + 1]`` for values, in column ``t`` the state that token ``t`` is drawn from, after a row's last token
        that of its end."""
        tokens = self.rows.index(paths)
        num_rows, num_columns = self.rows.completion_mask.shape
        states = np.full((num_rows, num_columns + 1), -1, np.int64)
        for row, path in zip(np.flatnonzero(self.rows.is_scored).tolist(), paths, strict=True):
            count = int((self.rows.completion_mask[row] != 0).sum())
            states[row, : count + 1] = path[len(path) - count - 1 :]
        return {LOG_PROB: tokens[LOG_PROB], ENTROPY: tokens[ENTROPY], VALUE: states}
