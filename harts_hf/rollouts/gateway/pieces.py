"""Token ids cut at special tokens: the pieces in which held and rendered histories are compared.

A tokenizer cuts text at special tokens before anything else, so what stands between two of them is tokenised
independently of the rest. Two pieces with the same decoded text are the same text, however it was tokenised: the
policy may sample other tokens than the tokenizer would choose.
"""

from collections.abc import Sequence
from functools import cached_property

from harts_hf.rollouts.gateway.formats import ChatFormat


class Piece:
    """A special token, or the token ids between two of them.

    Args:
        ids: ``[P]`` token ids.
        chat_format: decodes them.
        stands_for: the pieces of rendered histories that these ids take the place of; by default this piece itself.
    """

    def __init__(
        self, ids: Sequence[int], chat_format: ChatFormat, *, stands_for: "tuple[Piece, ...] | None" = None
    ) -> None:
        self.ids = tuple(ids)
        self.chat_format = chat_format
        self.stands_for: tuple[Piece, ...] = (self,) if stands_for is None else stands_for

    @property
    def is_special(self) -> bool:
        """Whether it is a special token by itself."""
        return len(self.ids) == 1 and self.ids[0] in self.chat_format.boundary_ids

    @cached_property
    def text(self) -> str:
        """Decoded, special tokens included."""
        return self.chat_format.decode(self.ids)

    def says(self, other: "Piece") -> bool:
        """Whether both have the same text."""
        return self.ids == other.ids or self.text == other.text


def cut(ids: Sequence[int], chat_format: ChatFormat) -> list[Piece]:
    """Cuts token ids into pieces."""
    pieces: list[Piece] = []
    run: list[int] = []
    for token in ids:
        if token in chat_format.boundary_ids:
            if run:
                pieces.append(Piece(run, chat_format))
                run = []
            pieces.append(Piece((token,), chat_format))
        else:
            run.append(token)
    if run:
        pieces.append(Piece(run, chat_format))
    return pieces


def joined(pieces: Sequence[Piece]) -> list[int]:
    """The token ids of pieces."""
    return [token for piece in pieces for token in piece.ids]


def agreement(held: Sequence[Piece], rendered: Sequence[Piece]) -> list[int]:
    """How far held pieces say what rendered ones do.

    Returns:
        For each held piece that agrees, the number of rendered pieces up to its beginning, and last their number up
        to the end of all that agree: one entry more than pieces that agree.
    """
    ends = [0]
    for piece in held:
        wanted = piece.stands_for
        found = rendered[ends[-1] : ends[-1] + len(wanted)]
        if len(found) < len(wanted) or not all(map(Piece.says, wanted, found)):
            break
        ends.append(ends[-1] + len(wanted))
    return ends
