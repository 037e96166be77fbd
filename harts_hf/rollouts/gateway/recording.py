"""The rows of an episode: what its requests and turns are to the training."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harts_hf.rollouts.engines import SampledTurn
from harts_hf.rollouts.gateway.answers import AssistantMessage
from harts_hf.rollouts.gateway.formats import ChatFormat
from harts_hf.rollouts.gateway.pieces import Piece, cut
from harts_hf.rollouts.gateway.requests import ChatRequest
from harts_hf.rollouts.gateway.splicing import Drift, History, extend, splice

Routes = NDArray[np.integer[Any]]


@dataclass(frozen=True, kw_only=True)
class EpisodeRow:
    """One sample of an episode, as TRL's ``rollout_func`` has it.

    Attributes:
        prompt_ids: ``[P]`` the history of the row's first turn.
        completion_ids: ``[T]`` the turn, and what followed it.
        logprobs: ``[T]`` as drawn; 0.0 where nothing was sampled.
        env_mask: ``[T]`` 1 where a token was sampled for this row. No draw is in two rows; two independent draws that
            coincide (the same history, the same token) are each in their own.
        routed_experts: ``[t, L, k]`` arrays, one behind the other: the engine's routes of the first tokens, prompt and
            completion; None where it was not asked for them.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    env_mask: list[int]
    routed_experts: list[Routes] | None = None


@dataclass
class _Row:
    """A row that may still grow.

    Attributes:
        pieces: its token ids, in pieces.
        answer: index of the piece in which its last answer begins.
        head: token ids of that piece before the answer.
        request: what the last answer answers.
        history: ids before the last answer.
        routes: of its first ids, in pieces.
    """

    ids: list[int]
    prompt_length: int
    pieces: list[Piece] = field(default_factory=list)
    answer: int = 0
    head: int = 0
    request: ChatRequest | None = None
    history: int = 0
    logprobs: list[float] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    routes: list[Routes] = field(default_factory=list)


class Spliced(NamedTuple):
    """A request's history as its episode has it.

    Attributes:
        ids: ``[L]`` token ids.
        pieces: the same, in pieces.
        drift: how it follows the rows before; None for an episode's first.
        num_kept: ids that rows had already.
        row: index of the row that it continues, or None.
        row_length: that row's tokens at this time.
        row_prompt_length: tokens of the row's prompt, all of ``ids`` where it begins a row.
    """

    ids: list[int]
    pieces: list[Piece]
    drift: Drift | None
    num_kept: int
    row: int | None
    row_length: int
    row_prompt_length: int


class Recording:
    """What was sampled in an episode. Not thread-safe.

    A turn whose history extends a row token for token continues that row; any other begins one.

    Args:
        chat_format: of the policy.
        end_ids: tokens that end turns.

    Attributes:
        drifts: histories by how they followed, "repaired" ones (:attr:`Drift.REALIGN`) among them.
        num_turns: turns so far.
    """

    def __init__(self, chat_format: ChatFormat, end_ids: Sequence[int]) -> None:
        self._format = chat_format
        self._end_ids = frozenset(end_ids)
        self._rows: list[_Row] = []
        self.drifts: Counter[Drift] = Counter()
        self.num_turns = 0

    def splice(self, rendered: Sequence[int]) -> Spliced:
        """A history with the ids that its episode has already, by the reuse rule.

        Args:
            rendered: ``[L]`` the history, tokenised anew.
        """
        pieces = cut(rendered, self._format)
        best: tuple[tuple[int, int, int], Drift, History, int] | None = None
        for index, row in enumerate(self._rows):
            drift, history = splice(
                row.pieces,
                pieces,
                answer=row.answer,
                head=row.head,
                end_ids=self._end_ids,
                parse=lambda ids, row=row: self._parse(row, ids),  # type: ignore[misc]
            )
            # Clean before repaired before forked, then the most ids, then the latest row.
            rank = (-list(Drift).index(drift), history.num_kept, index)
            if best is None or rank > best[0]:
                best = rank, drift, history, index
        if best is None:
            return Spliced(list(rendered), pieces, None, 0, None, 0, len(rendered))
        _, drift, history, index = best
        ids = history.ids
        if drift is Drift.FORK:
            return Spliced(ids, history.pieces, drift, history.num_kept, None, 0, len(ids))
        row = self._rows[index]
        return Spliced(ids, history.pieces, drift, history.num_kept, index, len(row.ids), row.prompt_length)

    def adopt(self, ids: Sequence[int]) -> Spliced:
        """A history whose ids somebody else has chosen: it continues the longest row that it extends."""
        ids = list(ids)
        begun = [index for index, row in enumerate(self._rows) if ids[: len(row.ids)] == row.ids]
        if begun:
            index = max(begun, key=lambda index: len(self._rows[index].ids))
            row = self._rows[index]
            length = len(row.ids)
            return Spliced(ids, cut(ids, self._format), Drift.CLEAN, length, index, length, row.prompt_length)
        drift = Drift.FORK if self._rows else None
        return Spliced(ids, cut(ids, self._format), drift, 0, None, 0, len(ids))

    def num_routed(self, history: Spliced) -> int:
        """Ids of a history whose routes are known from earlier turns."""
        return 0 if history.row is None else sum(map(len, self._rows[history.row].routes))

    def record(self, history: Spliced, turns: Sequence[SampledTurn], request: ChatRequest) -> None:
        """Adds turns that were drawn from one history.

        The first continues the history's row, unless another turn did so meanwhile; the others begin rows.
        """
        for number, turn in enumerate(turns):
            held = None if history.row is None else self._rows[history.row]
            row = None if number else held
            drift = history.drift if number == 0 else Drift.FORK
            if row is not None and len(row.ids) != history.row_length:
                row, drift = None, Drift.FORK
            if row is None:
                row = _Row(ids=list(history.ids), prompt_length=len(history.ids))
                self._rows.append(row)
            else:
                added = history.ids[len(row.ids) :]
                row.ids += added
                row.logprobs += [0.0] * len(added)
                row.mask += [0] * len(added)
            if drift is not None:
                self.drifts[drift] += 1
            row.history = len(row.ids)
            row.request = request
            row.pieces, row.answer = extend(history.pieces, turn.token_ids, self._format)
            row.head = row.history - sum(len(piece.ids) for piece in row.pieces[: row.answer])
            row.ids += turn.token_ids
            row.logprobs += turn.logprobs
            row.mask += [1] * len(turn.token_ids)
            if turn.routed_experts is not None:
                # They end before the turn's last token. What earlier turns of the row have said stays.
                start = len(row.ids) - 1 - len(turn.routed_experts)
                begun = row.routes or _first(start, [] if held is None else held.routes)
                row.routes = [*begun, turn.routed_experts[sum(map(len, begun)) - start :]]
            self.num_turns += 1

    def rows(self) -> list[EpisodeRow]:
        """The episode's samples, in the order in which they were begun; none for an episode without turns."""
        return [
            EpisodeRow(
                prompt_ids=row.ids[: row.prompt_length],
                completion_ids=row.ids[row.prompt_length :],
                logprobs=list(row.logprobs),
                env_mask=list(row.mask),
                routed_experts=list(row.routes) or None,
            )
            for row in self._rows
        ]

    def _parse(self, row: _Row, ids: list[int]) -> AssistantMessage:
        assert row.request is not None
        return self._format.parse(ids, row.request, history=row.ids[: row.history])


def _first(count: int, pieces: Sequence[Routes]) -> list[Routes]:
    """The first ``count`` entries of arrays that stand one behind the other."""
    found = []
    for piece in pieces:
        if count <= 0:
            break
        found.append(piece if len(piece) <= count else piece[:count])
        count -= len(piece)
    return found
