"""What commands print and write: text without control characters, files that are whole or not there."""

import contextlib
import json
import os
import select
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harts_hf.errors import HartsWarning


def printable(text: object) -> str:
    """``str(text)`` with each character that a terminal might obey, or cannot show, as an escape (``\\x1b``)."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in str(text)
    )


def printable_lines(text: object) -> str:
    """:func:`printable` of each line: for messages of others, which may have several."""
    return "\n".join(map(printable, str(text).splitlines()))


@contextlib.contextmanager
def warnings_in_lines() -> Iterator[None]:
    """Warnings of this package are printed as a line of the command's; Python's form names a file and quotes code."""
    stock = warnings.formatwarning

    def line_of(message: Any, category: type[Warning], *where: Any, **more: Any) -> str:
        if issubclass(category, HartsWarning):
            return f"harts: warning: {printable_lines(message)}\n"
        return stock(message, category, *where, **more)

    warnings.formatwarning = line_of
    try:
        yield
    finally:
        warnings.formatwarning = stock


def reader_is_gone() -> bool:
    """Whether stdout is a pipe that nobody reads any more; another broken pipe is not ours."""
    try:
        file = sys.stdout.fileno()
    except (OSError, ValueError, AttributeError):  # no file at all
        return False
    poll = select.poll()
    poll.register(file, 0)  # errors and hang-ups are reported unasked
    return bool(poll.poll(0))


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A new file beside ``path``, with its suffix, that takes its place when the block ends without an error.

    So a reader finds the old content or the new one, and an error, or a block that writes nothing, leaves the old.
    What is no regular file (a device, a pipe) is written to as it is; of a link, the file that it leads to is
    replaced.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        yield path
        return
    new = path.with_name(f".harts-{os.getpid()}{path.suffix}")
    try:
        yield new
        if new.exists():
            if path.exists():
                shutil.copymode(path, new)
            os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def write_json(path: str | Path, content: Any) -> None:
    """Writes a report: indented JSON, whole or not at all."""
    with replacing(path) as new:
        new.write_text(json.dumps(content, indent=2) + "\n")
