"""Rows of JSON, JSON Lines or Parquet files as JSON values, numbered from 1; null keys are as absent."""

import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from harts_hf.errors import RolloutFileError

JSON_LINES = (".jsonl", ".ndjson")
# One JSON value a file; those of SWE-agent are called .traj.
DOCUMENTS = (".json", ".traj")
# A small compressed file may unfold to anything: a JSON value (a line, or a whole document) and a file end somewhere.
MAX_VALUE_BYTES = 2**30
MAX_FILE_BYTES = 2**36


def numbered_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Where each row stands ("line 3"; in Parquet "row 3", in a JSON document "item 3" or "document"), and the row.

    A row is an object or a list. The objects that a JSON document lists are its rows, unless each has a ``role``:
    then they are messages, and the list is one row, as is anything else that a document may hold.

    A Parquet file gives every object of a column the fields of all of them and fills them with null, at every depth:
    such fields are left out, except a message's ``content``, which every message has. What Parquet does not keep is
    lost: nulls that were meant, the order of an object's fields, integers among floats. Objects that must stay as
    they are, such as the arguments of tool calls, are kept by writing them as JSON strings.

    Raises:
        RolloutFileError: another suffix, a damaged file, a value that is neither object nor list, or one of more than
            ``MAX_VALUE_BYTES``; more than ``MAX_FILE_BYTES`` in all.
    """
    name = path.name.lower().removesuffix(".gz")
    if name.endswith(".parquet"):
        yield from _parquet_rows(path)
    elif name.endswith(JSON_LINES):
        for number, line in _lines(path):
            yield f"line {number}", _parsed(line, f"{path}, line {number}")
    elif name.endswith(DOCUMENTS):
        yield from _items(_parsed(_whole(path), str(path)))
    else:
        raise RolloutFileError(
            f"{path}: expected a rollout file (.jsonl, .parquet, .json, .traj or .ndjson, or .gz of one), got "
            f"{'a folder' if path.is_dir() else path.suffix or 'no suffix'}; each row holds token_ids or messages, "
            "and the group that it is of (docs/formats.md)"
        )


def rows_of_table(table: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows of an Arrow table (a ``datasets.Dataset``), less what it filled with null, as those of Parquet."""
    for row in table:
        yield {key: _without_nulls(value) for key, value in row.items() if value is not None}


def name_without_suffixes(path: Path) -> str:
    """The file's name less ``.gz`` and what says its form."""
    name = path.name
    for suffix in (".gz", ".parquet", *JSON_LINES, *DOCUMENTS, ".traj"):
        if name.lower().endswith(suffix) and len(name) > len(suffix):
            name = name[: -len(suffix)]
    return name


def _opened(path: Path) -> BinaryIO:
    return gzip.open(path, "rb") if path.name.lower().endswith(".gz") else path.open("rb")  # type: ignore[return-value]


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    number = size = 0
    try:
        with _opened(path) as file:
            while line := file.readline(MAX_VALUE_BYTES + 1):
                number, size = number + 1, size + len(line)
                if len(line) > MAX_VALUE_BYTES or size > MAX_FILE_BYTES:
                    raise RolloutFileError(
                        f"{path}, line {number}: expected lines of at most {MAX_VALUE_BYTES:,} bytes and "
                        f"{MAX_FILE_BYTES:,} in all, got more"
                    )
                if line.strip():
                    yield number, line
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise RolloutFileError(f"{path}, after line {number}: expected a whole gzip file ({error})") from error


def _whole(path: Path) -> bytes:
    try:
        with _opened(path) as file:
            content = file.read(MAX_VALUE_BYTES + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise RolloutFileError(f"{path}: expected a whole gzip file ({error})") from error
    if len(content) > MAX_VALUE_BYTES:
        raise RolloutFileError(f"{path}: expected at most {MAX_VALUE_BYTES:,} bytes, got more")
    return content


def _parsed(text: bytes, where: str) -> Any:
    if not text.strip():
        raise RolloutFileError(f"{where}: expected at least one trajectory, got an empty file")
    try:
        value = json.loads(text)
    except UnicodeDecodeError as error:
        raise RolloutFileError(f"{where}: expected text in UTF-8, got another encoding ({error})") from error
    except (ValueError, RecursionError) as error:  # of JSON, of an integer of thousands of digits
        hint = "; several JSON values are a .jsonl file" if "Extra data" in str(error) else ""
        raise RolloutFileError(f"{where}: expected a JSON object, got invalid JSON ({error}{hint})") from error
    if isinstance(value, dict):
        return {key: entry for key, entry in value.items() if entry is not None}
    if isinstance(value, list) and value and all(isinstance(entry, dict | list) for entry in value):
        return value
    got = "list of other things than objects" if isinstance(value, list) else type(value).__name__
    raise RolloutFileError(f"{where}: expected a JSON object, got {got}")


def _items(document: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(document, list) and all(isinstance(entry, dict) and "role" not in entry for entry in document):
        for number, entry in enumerate(document, 1):
            yield f"item {number}", {key: value for key, value in entry.items() if value is not None}
    else:
        yield "document", document


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow.parquet

    source = io.BytesIO(_whole(path)) if path.name.lower().endswith(".gz") else path
    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(source).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"row {number}", next(rows_of_table([row]))
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
