"""SIGTERM as an interrupt: what launchers, batch systems and containers send before they kill."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(KeyboardInterrupt):
    """SIGTERM came. Whatever is done for an interrupt (agents ended, rollouts salvaged) is done for it too."""


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM raises :class:`Terminated` in the main thread while the block runs; then it does what it did before.

    Only the first does: Slurm signals a launcher and its workers, and the launcher its workers once more, which must
    not end what the first has begun. So after a first one SIGTERM stays ignored while the process ends (SIGKILL is for
    those that do not). Where SIGTERM is ignored it stays so, and outside the main thread, where Python sets no
    handlers, nothing is changed.
    """
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or before in (None, signal.SIG_IGN):
        yield
        return
    came = False

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if not came:
            came = True
            raise Terminated

    signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        # Ignored, not handled: Python takes its handlers away while it shuts down, and the status has to stay 143.
        signal.signal(signal.SIGTERM, signal.SIG_IGN if came else before)
