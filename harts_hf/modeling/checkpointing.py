"""Activation checkpointing that is off for a while, by the names that Transformers has for it now.

TRL 1.16 does the same by names that Transformers 5.24 has given up, each of which warns the user.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_checkpointing(model: Any, activation_checkpointing_kwargs: dict[str, Any] | None = None) -> Iterator[None]:
    """Inside, the model's layers are not checkpointed; afterwards they are if they were.

    Args:
        model: a model of Transformers, or one of PEFT around it.
        activation_checkpointing_kwargs: with which checkpointing is switched on again.
    """
    was_on = model.is_activation_checkpointing
    if was_on:
        model.activation_checkpointing_disable()
    try:
        yield
    finally:
        if was_on:
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=activation_checkpointing_kwargs)
