"""Runs games that print, and that use what all threads share, one at a time."""

import contextlib
import io
import threading
from collections.abc import Iterator

_ONE_AT_A_TIME = threading.RLock()


@contextlib.contextmanager
def alone_and_quiet() -> Iterator[None]:
    """Inside, no other thread is inside, and what is printed to standard output is dropped.

    Standard output belongs to the whole process: were two threads to replace it at a time, one could put the other's
    replacement back for good. A game that hangs inside keeps the others out.
    """
    with _ONE_AT_A_TIME, contextlib.redirect_stdout(io.StringIO()):
        yield
