"""Texts as token ids, none longer than there is room for: what cannot fit is found out from its beginning."""

from typing import Any

# No token of any vocabulary is longer, so a text of more than so many characters per token is not even encoded.
_MAX_CHARACTERS_PER_TOKEN = 256
# What a text is first tried with: most have fewer characters per token.
_CHARACTERS_PER_TOKEN = 8
# Tokens at the end of a part that the whole text may have otherwise.
_OPEN_END = 64
# Short answers recur (of siblings, "error"), and a tokenizer's call costs more than their tokens do.
_MAX_REMEMBERED_CHARACTERS = 256


class Encoder:
    """Encodes texts without adding special tokens.

    Args:
        tokenizer: the policy's.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str, limit: int | None = None) -> list[int] | None:
        """Token ids of ``text``; None for more than ``limit``.

        Of a text that is far too long only a part is encoded, in proportion to ``limit``.
        """
        if limit is not None and self._is_longer(text, limit):
            return None
        ids = self._known.get(text)
        if ids is None:
            ids = self._ids(text)
            if len(text) <= _MAX_REMEMBERED_CHARACTERS:
                self._known[text] = ids
        return list(ids) if limit is None or len(ids) <= limit else None

    def _is_longer(self, text: str, limit: int) -> bool:
        """Whether a beginning of ``text`` says that the whole has more tokens than ``limit``; False if unknown."""
        if len(text) > limit * _MAX_CHARACTERS_PER_TOKEN:
            return True
        size = (limit + _OPEN_END) * _CHARACTERS_PER_TOKEN
        while size < len(text):
            if len(self._ids(text[:size])) > limit + _OPEN_END:
                return True
            size *= 4
        return False

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []
