"""Reads rollout files: trajectories by token ids, conversations of many programs, shapes of trees.

A row of a rollout file has ``group`` (string or integer), ``token_ids`` (list of integers) or ``messages`` (with
optional ``tools``; needs a tokenizer), and optionally, with one value per token where a list: ``loss_mask`` (0 or 1),
``advantage`` (one number or a list), ``reward`` (one number), ``old_logprobs`` (null where unknown); and ``episode``
(string or integer): rows of a group with the same one are samples of one rollout. A row of a shape file has ``group``,
``parent``, ``length``, ``sample_node`` and optionally ``reward`` (a number or null per trajectory) and ``trained``
(half-open token spans per trajectory). Other forms are read by ``readers/``; docs/formats.md lists them. A key whose
value is null is as absent. Where no row has a group, the file is one.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from harts_hf.errors import RolloutFileError
from harts_hf.rollouts.reading import Reading
from harts_hf.rollouts.recorded import Rollout, RolloutFile, RolloutGroup
from harts_hf.rollouts.rows import numbered_rows

__all__ = ["Rollout", "RolloutFile", "RolloutGroup", "read_rollout_file", "read_rollout_rows", "read_rollouts"]


def read_rollouts(
    path: str | Path,
    tokenizer: Any = None,
    *,
    format: str = "auto",
    samples_per: str = "turn",
    group_key: str | None = None,
) -> list[RolloutGroup]:
    """The groups of :func:`read_rollout_file`."""
    return read_rollout_file(path, tokenizer, format=format, samples_per=samples_per, group_key=group_key).groups


def read_rollout_file(
    path: str | Path,
    tokenizer: Any = None,
    *,
    format: str = "auto",
    samples_per: str = "turn",
    group_key: str | None = None,
) -> RolloutFile:
    """Reads ``.jsonl``, ``.json``, ``.traj`` or ``.parquet``, or ``.gz`` of one of them.

    Args:
        path: the file.
        tokenizer: anything with Transformers' ``apply_chat_template``; needed for conversations. The sample of a turn
            is what the template renders for the messages before it, and the turn; its ``loss_mask`` is the turn.
        format: the name of the file's form, or ``"auto"``: it is recognised from the first row.
        samples_per: ``"turn"``: a sample per turn of the assistant; ``"conversation"``: one per conversation, whose
            mask is the template's assistant mask where it marks generations, less answers that were not sampled. A
            row with values per token (``loss_mask``, ``old_logprobs``, a list of advantages) is always one sample.
        group_key: the key of each row's (or conversation's) group, in nested objects with dots between the keys; by
            default what the form has, or the whole file.

    Returns:
        The groups in the order of their first rows. Rows of a group need not be neighbours. Each conversation is an
        episode of its own.

    Raises:
        FileNotFoundError: no such file.
        RolloutFileError: a row that is not what the module's docstring or the form says, or of no known form; messages
            that are not wholly in the tokens. The text names the file and the line (Parquet: the row), from 1.

    Warns:
        HartsWarning: keys that are not read, by their names; thoughts that the chat template does not write; rows of
            which nothing would be trained.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    reading = Reading(path, tokenizer, format, samples_per, group_key)
    _add_all(reading, f"{path}, ", numbered_rows(path))
    return reading.result()


def read_rollout_rows(
    rows: Iterable[Any],
    tokenizer: Any = None,
    *,
    format: str = "auto",
    samples_per: str = "turn",
    group_key: str | None = None,
) -> RolloutFile:
    """Reads rows that a program has, as :func:`read_rollout_file` reads those of a file.

    Args:
        rows: objects (or lists) of JSON values; at their first level NumPy arrays and tensors will do for lists.
        tokenizer: see :func:`read_rollout_file`, as the other arguments.

    Returns:
        The groups; the one of rows without a group is called ``rows``.

    Raises:
        RolloutFileError: as there; the text names the row, from 1.
    """
    reading = Reading(Path("rows"), tokenizer, format, samples_per, group_key)
    _add_all(reading, "", ((f"row {number}", _plain(row)) for number, row in enumerate(rows, 1)))
    return reading.result()


def _add_all(reading: Reading, prefix: str, rows: Iterable[tuple[str, Any]]) -> None:
    for where, row in rows:
        try:
            reading.add(row, where)
        except RecursionError as error:
            raise RolloutFileError(f"{prefix}{where}: expected objects nested less deeply") from error
        except ValueError as error:
            raise RolloutFileError(f"{prefix}{where}: {error}") from error


def _plain(row: Any) -> Any:
    if not isinstance(row, Mapping):
        return row
    lists = {key: value.tolist() if hasattr(value, "tolist") else value for key, value in row.items()}
    return {key: value for key, value in lists.items() if value is not None}
