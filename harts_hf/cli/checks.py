"""What commands check before the work begins: files to write, seeds, devices."""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any


def check_output_file(option: str, name: str | None) -> None:
    """Checks that a file can be written where ``option`` says; leaves nothing behind.

    Raises:
        ValueError: it cannot; the message names the option, the file and the reason.
    """
    if name is None:
        return
    path = Path(name)
    is_new = not os.path.lexists(path)
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise ValueError(
            f"expected {option} to be a file that can be written, got {name!r}: {error.strerror}"
        ) from error
    if is_new:
        path.unlink()


def check_output_folder(option: str, name: str) -> None:
    """Makes the folder that ``option`` says and checks that files can be written into it.

    Raises:
        ValueError: they cannot; the message names the option, the folder and the reason.
    """
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=name):
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
    value = int(text)
    if not 0 <= value < 2**32:
        raise argparse.ArgumentTypeError(f"expected at least 0 and less than 2**32, got {text}")
    return value
