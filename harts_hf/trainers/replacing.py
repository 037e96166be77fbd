"""Methods of one object that stand in for others for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, method: Any) -> Iterator[None]:
    """Inside, ``owner.name`` is ``method``; afterwards it is what it was, also where somebody had replaced it."""
    own = vars(owner).get(name)
    setattr(owner, name, method)
    try:
        yield
    finally:
        delattr(owner, name)
        if own is not None:
            setattr(owner, name, own)
