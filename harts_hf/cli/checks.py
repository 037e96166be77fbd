"""What commands check before the work begins: files to write, seeds, devices."""

import argparse
import errno
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

Value = TypeVar("Value")


def check_output_file(option: str, name: str | None) -> None:
    """Checks that a file can be written where ``option`` says; leaves nothing behind.

    Raises:
        ValueError: it cannot; the message names the option, the file and the reason.
    """
    if name is None:
        return
    try:
        path = Path(os.path.realpath(name))
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if path.is_file() or not path.exists():  # a new file takes its place
            with tempfile.TemporaryFile(dir=path.parent):
                pass
    except OSError as error:
        raise ValueError(
            f"expected {option} to be a file that can be written, got {name!r}: {error.strerror}"
        ) from error


def refuse_to_overwrite(output: str | None, *inputs: str | None) -> None:
    """Checks that writing ``output`` leaves every input as it is; names that are None are passed over.

    Args:
        output: the file or folder to write.
        inputs: files and folders that the command reads. Names of a hub that are no path here do not matter.

    Raises:
        ValueError: ``output`` is an input, by whatever path or link, or a file that is there in an input's folder.
    """
    for name in inputs:
        if output is not None and name is not None and _is_part_of(output, name):
            relation = "an input" if os.path.realpath(output) == os.path.realpath(name) else f"part of {name!r}"
            raise ValueError(f"expected an output that is no input, got {output!r}, which is {relation}")


def refuse_same_output(option: str, name: str | None, other_option: str, other: str | None) -> None:
    """Checks that two outputs are two files.

    Raises:
        ValueError: they are one, by whatever path or link.
    """
    if name is not None and other is not None and _is_part_of(name, other):
        raise ValueError(f"expected another file for {option} than for {other_option}, got {name!r} and {other!r}")


def _is_part_of(output: str, name: str) -> bool:
    new, old = Path(os.path.realpath(output)), Path(os.path.realpath(name))
    if new == old:
        return True
    if not new.exists() or not old.exists():
        return False
    return new.samefile(old) or (new.is_file() and old in new.parents)


def check_output_folder(option: str, name: str, *, makes: bool = True) -> None:
    """Makes the folder that ``option`` says and checks that files can be written into it.

    Args:
        option: what names it.
        name: the folder.
        makes: if not, nothing is made: where it is not there, the nearest folder above it is tried.

    Raises:
        ValueError: they cannot; the message names the option, the folder and the reason.
    """
    try:
        folder = Path(name)
        if makes:
            folder.mkdir(parents=True, exist_ok=True)
        else:
            folder = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"expected {option} to be a folder that can be written, got {name!r}: {error.strerror}"
        ) from error


def check_picture(option: str, name: str | None) -> None:
    """:func:`check_output_file`, and that the suffix is that of a picture.

    Raises:
        ValueError: it is not; the message lists those that are.
    """
    if name is None:
        return
    from matplotlib.backend_bases import FigureCanvasBase

    suffixes = sorted(f".{suffix}" for suffix in FigureCanvasBase.get_supported_filetypes())
    if Path(name).suffix.lower() not in suffixes:
        raise ValueError(f"expected {option} to end in one of {', '.join(suffixes)}, got {name!r}")
    check_output_file(option, name)


def find_device(name: str | None) -> Any:
    """The ``torch.device`` of ``--device``; without a name a GPU if there is one.

    Raises:
        ValueError: no device of that name, or none here.
    """
    import torch

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"expected a device such as cpu or cuda, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"expected a device such as cpu or cuda, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"expected a device that is here, got {name}: torch sees {torch.cuda.device_count()} GPUs")
    return device


def seed(text: str) -> int:
    """The type of ``--seed``: what both NumPy and torch take."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value < 2**32:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 0 and less than 2**32, got {text!r}")
    return value


def picked(values: Sequence[Value], indices: Sequence[int] | None, most: int) -> list[Value]:
    """Some entries by index, or the first ones, at most so many.

    Raises:
        ValueError: an index past the end, below 0 or twice, or fewer than one asked for.
    """
    if indices is None:
        if most < 1:
            raise ValueError(f"expected at least one group, got {most}")
        return list(values[:most])
    wrong = [index for index in indices if not 0 <= index < len(values)]
    if wrong:
        raise ValueError(f"expected groups from 0 to {len(values) - 1}, got {wrong[0]}")
    twice = [index for place, index in enumerate(indices) if index in indices[:place]]
    if twice:
        raise ValueError(f"expected each group once, got {twice[0]} twice")
    return [values[index] for index in indices]
