"""Rows that are longer than what a model was made for: computed all the same, as by the stock model."""

from typing import Any


def beyond_positions(config: Any, length: int, name: str = "a row") -> str | None:
    """What there is to say of a row that has more tokens than its model's `max_position_embeddings`; None if nothing.

    Args:
        config: the model's.
        length: tokens of the longest row.
        name: what to call the row.
    """
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit is None or length <= limit:
        return None
    return (
        f"{name} of {length:,} tokens is longer than the model's max_position_embeddings, {limit:,}: it is computed, "
        "at positions that the model was not made for, and engines sample no further than there"
    )
