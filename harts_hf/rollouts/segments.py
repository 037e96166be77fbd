"""Token ids of texts that repeat one another: each piece between special tokens is tokenised once.

A tokenizer cuts a text at its special tokens first and treats what lies between them piece by piece. So the ids of a
text are those of its pieces, where a piece begins at a special token, and a history that a hundred turns repeat is
tokenised once. :meth:`SegmentedTokenizer.is_exact` compares with the ids of the whole text; where they differ, pieces
are given up and whole texts tokenised.
"""

import re
from typing import Any

import numpy as np

from harts_hf.tree import IntArray


class SegmentedTokenizer:
    """Tokenises texts piece by piece, and remembers the pieces.

    Args:
        tokenizer: a tokenizer of Transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Tokens that take white space from neighbours, or are looked for in normalised text, are no place to cut.
        names = [
            token.content
            for token in tokenizer.added_tokens_decoder.values()
            if token.special and not (token.lstrip or token.rstrip or token.single_word or token.normalized)
        ]
        names.sort(key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, names))) if names else None
        self._uses_pieces = bool(names)
        self._pieces: list[str] = []
        self._ids: dict[str, IntArray] = {}

    def encode(self, text: str) -> IntArray:
        """``[L]`` int64: the ids of a text, without special tokens around it."""
        if not self._uses_pieces:
            return self._whole([text])[0]
        pieces = self._pieces = self._split(text)
        new = [piece for piece in dict.fromkeys(pieces) if piece not in self._ids]
        if new:
            self._ids.update(zip(new, self._whole(new), strict=True))
        return np.concatenate([self._ids[piece] for piece in pieces]) if pieces else np.zeros(0, np.int64)

    def tokens_before(self, text: str, position: int) -> int:
        """How many of the text's tokens are those of ``text[:position]``; a token across the cut is not."""
        start, count = 0, 0
        for piece in self._split(text) if self._uses_pieces else [text]:
            if start + len(piece) > position:
                head = self.encode_piece(piece[: position - start])
                ids = self.encode_piece(piece)[: len(head)]
                differ = np.flatnonzero(head[: len(ids)] != ids)
                return count + (int(differ[0]) if len(differ) else len(ids))
            start, count = start + len(piece), count + len(self.encode_piece(piece))
        return count

    def is_exact(self, text: str, ids: IntArray) -> bool:
        """Whether ``ids`` are those of the whole text; if not, pieces are not used any more."""
        exact = not self._uses_pieces or np.array_equal(self._whole([text])[0], ids)
        self._uses_pieces = self._uses_pieces and exact
        return exact

    def encode_piece(self, piece: str) -> IntArray:
        """The ids of a piece."""
        if piece not in self._ids:
            self._ids[piece] = self._whole([piece])[0]
        return self._ids[piece]

    def _whole(self, texts: list[str]) -> list[IntArray]:
        encoded = self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [np.array(ids, np.int64) for ids in encoded["input_ids"]]

    def _split(self, text: str) -> list[str]:
        """The pieces of a text; those that it has in common with the last text are not looked for again."""
        assert self.special is not None
        pieces, position = [], 0
        for piece in self._pieces:
            if not text.startswith(piece, position):
                break
            pieces.append(piece)
            position += len(piece)
        if pieces and not self.special.match(text, position):  # the last one may go on
            position -= len(pieces.pop())
        cuts = [match.start() for match in self.special.finditer(text, position) if match.start() > position]
        for start, end in zip([position, *cuts], [*cuts, len(text)], strict=True):
            if end > start:
                pieces.append(text[start:end])
        return pieces
