"""The reuse rule: which token ids of an episode's rows a request's history keeps.

An agent sends texts. Tokenised anew, a turn of the policy may become other tokens than it sampled; so held ids stay
as far as their decoded text equals the rendered text, and only what follows, from a special token on, is tokenised. In
the row's last answer, white space and the way in which arguments are written may differ (a template writes them anew):
the sampled ids stay. Anything else begins a row of its own. What the template drops, such as thinking, is never put
back.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from harts_hf.rollouts.gateway.answers import AssistantMessage
from harts_hf.rollouts.gateway.formats import ChatFormat
from harts_hf.rollouts.gateway.pieces import Piece, agreement, cut, joined

Parse = Callable[[list[int]], AssistantMessage]


class Drift(StrEnum):
    """How a request's history follows the rows before it (TRL's ``DriftKind``)."""

    CLEAN = "clean"  # it says all of a row, and goes on
    REALIGN = "realign"  # so it does but for the format of the row's last answer, which is kept as sampled
    FORK = "fork"  # it begins a new row


@dataclass(frozen=True)
class History:
    """A request's history.

    Attributes:
        pieces: its token ids, in pieces; ids of rows where they were kept.
        num_kept: how many of its first ids were kept.
    """

    pieces: list[Piece]
    num_kept: int

    @property
    def ids(self) -> list[int]:
        """``[L]`` token ids."""
        return joined(self.pieces)


def extend(pieces: list[Piece], sampled: Sequence[int], chat_format: ChatFormat) -> tuple[list[Piece], int]:
    """Appends a turn to a history.

    Returns:
        The pieces of both, and the index of the one in which the turn begins.
    """
    last = pieces[-1]
    if last.is_special or last.stands_for != (last,):
        return pieces + cut(sampled, chat_format), len(pieces)
    # Text goes on where the template's beginning of the answer ends: one piece, unless the turn begins with a special
    # token.
    return pieces[:-1] + cut((*last.ids, *sampled), chat_format), len(pieces) - 1


def splice(
    held: list[Piece], rendered: list[Piece], *, answer: int, head: int, end_ids: frozenset[int], parse: Parse
) -> tuple[Drift, History]:
    """Holds a rendered history against one row.

    Args:
        held: the row's pieces.
        rendered: those of the history, tokenised anew.
        answer: index of the held piece in which the row's last answer begins.
        head: token ids of that piece before the answer.
        end_ids: tokens that end turns.
        parse: a turn's ids to a message, for the row's last answer.

    Returns:
        How it follows, and the history with the ids that are kept. A fork keeps those of whole pieces.
    """
    ends = agreement(held, rendered)
    agreeing = len(ends) - 1
    if agreeing == len(held):
        return Drift.CLEAN, _kept(held, rendered[ends[-1] :])
    if agreeing >= answer:
        realigned = _realigned(held, rendered, ends[answer], answer, head, end_ids, parse)
        if realigned is not None:
            return Drift.REALIGN, realigned
    return Drift.FORK, _kept(held[:agreeing], rendered[ends[-1] :])


def _kept(held: list[Piece], rest: list[Piece]) -> History:
    return History(held + rest, sum(len(piece.ids) for piece in held))


def _realigned(
    held: list[Piece],
    rendered: list[Piece],
    start: int,
    answer: int,
    head: int,
    end_ids: frozenset[int],
    parse: Parse,
) -> History | None:
    ends = (index for index in range(start, len(rendered)) if _ends_turn(rendered[index], end_ids))
    end = next(ends, None)
    if end is None:
        return None
    sampled, again = held[answer:], rendered[start : end + 1]
    is_whole = _ends_turn(sampled[-1], end_ids)
    # Tags are no format: thinking whose tags the template drops is not put back, even where it was empty.
    if _tags(sampled[:-1] if is_whole else sampled) != _tags(again[:-1]):
        return None
    ids = joined(sampled)
    anew = _without_head(sampled[0], again, head)
    if anew is None or parse(ids[head:]).without_format() != parse(anew).without_format():
        return None
    # A turn that was cut has the end that the template gives it.
    kept = ids if is_whole else ids + list(again[-1].ids)
    piece = Piece(kept, sampled[0].chat_format, stands_for=tuple(again))
    history = _kept(held[:answer], [piece, *rendered[end + 1 :]])
    return History(history.pieces, history.num_kept + len(ids))


def _ends_turn(piece: Piece, end_ids: frozenset[int]) -> bool:
    return len(piece.ids) == 1 and piece.ids[0] in end_ids


def _tags(pieces: Sequence[Piece]) -> list[tuple[int, ...]]:
    return [piece.ids for piece in pieces if piece.is_special]


def _without_head(first: Piece, again: list[Piece], head: int) -> list[int] | None:
    """Token ids of an answer that was rendered anew, less the template's beginning of it; None where that differs."""
    if head == 0:
        return joined(again)
    beginning = first.ids[:head]
    if again[0].ids[:head] == beginning:
        return list(again[0].ids[head:]) + joined(again[1:])
    text, start = again[0].text, first.chat_format.decode(beginning)
    if not text.startswith(start):
        return None
    return first.chat_format.encode(text[len(start) :]) + joined(again[1:])
