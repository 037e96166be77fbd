"""Rows of a JSONL or Parquet file as dictionaries, numbered from 1; a key whose value is null is as absent."""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harts_hf.errors import RolloutFileError

Row = dict[str, Any]


def numbered_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Where each row stands ("line 3"; in Parquet "row 3"), and the row.

    A Parquet file gives every object of a column the fields of all of them and fills them with null, at every depth:
    such fields are left out, except a message's ``content``, which every message has. What Parquet does not keep is
    lost: nulls that were meant, the order of an object's fields, integers among floats. Objects that must stay as
    they are, such as the arguments of tool calls, are kept by writing them as JSON strings.

    Raises:
        RolloutFileError: another suffix, a damaged file, a line that is not a JSON object.
    """
    if path.name.endswith(".parquet"):
        yield from _parquet_rows(path)
    elif path.name.endswith((".jsonl", ".jsonl.gz")):
        for number, line in _lines(path):
            try:
                row = _parse(line)
            except ValueError as error:
                raise RolloutFileError(f"{path}, line {number}: {error}") from error
            yield f"line {number}", {key: value for key, value in row.items() if value is not None}
    else:
        raise RolloutFileError(f"{path}: expected a .jsonl, .jsonl.gz or .parquet file")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, line
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise RolloutFileError(f"{path}, after line {number}: expected a whole gzip file ({error})") from error


def _parse(line: bytes) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # of JSON, of UTF-8, of an integer of thousands of digits
        raise ValueError(f"expected a JSON object, got invalid JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, got {type(row).__name__}")
    return row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Row]]:
    import pyarrow.parquet

    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"row {number}", {key: _without_nulls(value) for key, value in row.items() if value is not None}
    except (pyarrow.ArrowException, OSError) as error:
        raise RolloutFileError(f"{path}, after row {number}: expected a Parquet file ({error})") from error


def _without_nulls(value: Any) -> Any:
    """``value`` less the null fields of objects. Entries of lists stay: Parquet fills fields only."""
    if isinstance(value, list):
        first = next((entry for entry in value if entry is not None), None)  # Parquet's lists are of one type
        return [_without_nulls(entry) for entry in value] if isinstance(first, dict | list) else value
    if isinstance(value, dict):
        is_message = "role" in value and "content" in value
        return {
            key: _without_nulls(entry)
            for key, entry in value.items()
            if entry is not None or (is_message and key == "content")
        }
    return value
