"""A check that a tokenizer is one."""

from typing import Any


def check_vocabulary(tokenizer: Any, name: str) -> None:
    """Checks that a tokenizer has other tokens than the added ones.

    Of a folder with ``config.json`` and no tokenizer Transformers (5.x) makes, for some models, one of special tokens
    alone, which reads every text as nothing.

    Args:
        tokenizer: as ``AutoTokenizer`` returned it.
        name: what it was loaded from.

    Raises:
        ValueError: it has none.
    """
    if hasattr(tokenizer, "get_added_vocab") and len(tokenizer) <= len(tokenizer.get_added_vocab()):
        raise ValueError(
            f"expected a tokenizer with a vocabulary in {name!r}, got one of {len(tokenizer)} special tokens: are its "
            "files (tokenizer.json) there?"
        )
