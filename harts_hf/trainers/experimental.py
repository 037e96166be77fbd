"""TRL's notices of experimental features, for those who use them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SWITCH = "TRL_EXPERIMENTAL_SILENCE"  # TRL's own


@contextmanager
def own_collectors(rollout_func: Any) -> Iterator[None]:
    """Inside, TRL does not call a collector of this package experimental: this package answers for that.

    A ``rollout_func`` of the user's own is one of TRL's experimental features, and TRL says so.
    """
    if not type(rollout_func).__module__.startswith("harts_hf.") or _SWITCH in os.environ:
        yield
        return
    os.environ[_SWITCH] = "1"
    try:
        yield
    finally:
        del os.environ[_SWITCH]
