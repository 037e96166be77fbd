"""The turns that are being sampled, as rows of one decoding batch.

A row is a history that has not been told apart yet: all turns that continue the same tokens share it, whichever
request they belong to, and part when they draw different tokens. So what several conversations have in common is read
once, and a policy that is sure of itself costs few rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from harts_hf.rollouts.engines.drawing import Draw, TokenDrawer
from harts_hf.rollouts.engines.engine import EngineError
from harts_hf.rollouts.engines.kept import KeptStates, history_key, key_of_beginning
from harts_hf.rollouts.engines.routes import RouterTap
from harts_hf.rollouts.engines.states import RowStates, join
from harts_hf.rollouts.engines.turns import Turn


@dataclass(eq=False, slots=True)
class Row:
    """One row: its turns stand at the same token of the same history.

    Attributes:
        key: of the history that the turns continue (:func:`history_key`).
        history_length: its tokens.
        unread: the tokens that the row is about to read, at least one; when all are read, each turn draws its next.
        turns: that share the row.
    """

    key: bytes
    history_length: int
    unread: Sequence[int]
    turns: list[Turn]


class DecodingBatch:
    """Reads one token a row at a time; rows may join between any two.

    Args:
        model: the policy.
        drawer: draws next tokens.
        kept: gets the states at the ends of histories and turns.
        tap: notes experts of the tokens that are read.

    Attributes:
        rows: that are being sampled.
        num_read_tokens: tokens read so far, each once for all the turns that share it.
    """

    def __init__(
        self, model: PreTrainedModel, *, drawer: TokenDrawer, kept: KeptStates, tap: RouterTap | None = None
    ) -> None:
        self._model = model
        self._tap = tap
        self._drawer = drawer
        self._kept = kept
        self._states: RowStates | None = None
        self.rows: list[Row] = []
        self.num_read_tokens = 0

    def add(self, rows: Sequence[Row], states: Sequence[tuple[RowStates, Sequence[int]]]) -> None:
        """Adds rows.

        Args:
            rows: R new ones.
            states: what they have read: states and rows of them, R in all, in order.
        """
        own = [] if self._states is None else [(self._states, range(len(self.rows)))]
        self._states = join([*own, *states])
        self.rows += rows

    def clear(self) -> None:
        """Forgets all rows."""
        self.rows, self._states = [], None

    def step(self) -> list[Turn]:
        """Has every row read a token, and the turns of those that have read all draw their next.

        Returns:
            The turns that are over now.

        Raises:
            EngineError: the model's logits are not numbers.
        """
        assert self._states is not None
        logits = self._states.read(self._model, [row.unread[:1] for row in self.rows], tap=self._tap)
        self.num_read_tokens += len(self.rows)
        draws = self._draw(logits)
        ended: list[Turn] = []
        children: list[Row] = []
        parents: list[int] = []
        kept: dict[int, bytes] = {}
        for index, row in enumerate(self.rows):
            if index not in draws:
                row.unread = row.unread[1:]
                children.append(row)
                parents.append(index)
                if len(row.unread) == 1:
                    kept[index] = key_of_beginning(row.key, row.history_length - 1)
                continue
            turns_by_token: dict[int, list[Turn]] = {}
            for turn, draw in zip(row.turns, draws[index], strict=True):
                if math.isnan(draw.logprob):
                    raise EngineError("expected logits that are numbers, got NaN: are the model's weights finite?")
                if turn.add(draw):
                    turn.routes = self._states.routes[index]
                    ended.append(turn)
                    kept[index] = row.key + history_key(turn.token_ids[:-1])
                else:
                    turns_by_token.setdefault(draw.token, []).append(turn)
            children += [Row(row.key, row.history_length, (token,), turns) for token, turns in turns_by_token.items()]
            parents += [index] * len(turns_by_token)
        if kept:
            self._kept.keep(self._states.take(list(kept)), list(kept.values()))
        if parents != list(range(len(self.rows))):
            self._states = self._states.take(parents) if parents else None
        self.rows = children
        return ended

    def _draw(self, logits: Tensor) -> dict[int, list[Draw]]:
        """The next tokens of each row that has read all of its own."""
        rows = [index for index, row in enumerate(self.rows) if len(row.unread) == 1]
        if not rows:
            return {}
        turns = [self.rows[index].turns for index in rows]
        draws = self._drawer.draw(
            logits if len(rows) == len(self.rows) else logits[rows],
            [[turn.uniform() for turn in turns_of_row] for turns_of_row in turns],
            entropies=any(turn.entropies for turns_of_row in turns for turn in turns_of_row),
        )
        return dict(zip(rows, draws, strict=True))
