"""What was collected before a collection failed, as a rollout file: hours of an agent's work are not lost."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harts_hf.rollouts.fields import check_keys
from harts_hf.rollouts.readers import ROLLOUT_KEYS


def rollout_row(
    group: str | int,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    *,
    env_mask: Sequence[int] | None = None,
    logprobs: Sequence[float] | None = None,
    reward: float | None = None,
) -> dict[str, Any]:
    """A row of a ``rollout_func``'s answer as a row of a rollout file (see :mod:`harts_hf.rollouts.files`).

    Args:
        group: what the rollouts of a prompt have in common.
        prompt_ids: ``[P]`` token ids.
        completion_ids: ``[C]`` token ids.
        env_mask: ``[C]``, 1 where the policy wrote the token; by default everywhere.
        logprobs: ``[C]``, as sampled.
        reward: of the rollout, if it is known already.

    Raises:
        ValueError: lists of other lengths.
    """
    count = len(completion_ids)
    mask = [1] * count if env_mask is None else [int(entry) for entry in env_mask]
    if len(mask) != count or (logprobs is not None and len(logprobs) != count):
        got = f"{len(mask)} and {'none' if logprobs is None else len(logprobs)}"
        raise ValueError(f"expected {count} entries of env_mask and of logprobs, one per token, got {got}")
    row: dict[str, Any] = {
        "group": group,
        "token_ids": [int(token) for token in (*prompt_ids, *completion_ids)],
        "loss_mask": [0] * len(prompt_ids) + mask,
    }
    if logprobs is not None:
        row["old_logprobs"] = [0.0] * len(prompt_ids) + [float(entry) for entry in logprobs]
    if reward is not None:
        row["reward"] = float(reward)
    return row


def save_rows(rows: Sequence[Mapping[str, Any]], folder: str | Path, name: str) -> Path:
    """Writes a rollout file that ``harts plan`` reads; never over another one.

    Args:
        rows: of a rollout file, one per trajectory, at least one.
        folder: made if it is missing.
        name: of the file, without suffix; a number is added if there is one of this name.

    Returns:
        The file, whole: it gets its name when all is written.

    Raises:
        ValueError: no rows, unknown keys, numbers that JSON lacks.
    """
    if not rows:
        raise ValueError("expected at least one row, got none")
    for row in rows:
        check_keys(row, ROLLOUT_KEYS)
    text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".{name}.{os.getpid()}.part"
    unfinished.write_text(text, encoding="utf-8")
    number = 1
    while True:
        path = folder / (f"{name}.jsonl" if number == 1 else f"{name}-{number}.jsonl")
        try:
            path.touch(exist_ok=False)  # takes the name; renaming alone would go over another file
        except FileExistsError:
            number += 1
        else:
            return unfinished.replace(path)


@contextmanager
def saved_on_failure(rows: Callable[[], Sequence[Mapping[str, Any]]], folder: str | Path, name: str) -> Iterator[None]:
    """Saves what has been collected if its block raises, and notes in the exception where it lies.

    Interruptions (Ctrl-C) count as failures. What cannot be saved is noted, too: the block's exception stays the one
    that is raised.

    Args:
        rows: called then; the rows so far, as for :func:`save_rows`. None: nothing is written.
        folder: as for :func:`save_rows`.
        name: as for :func:`save_rows`.
    """
    try:
        yield
    except BaseException as error:
        try:
            collected = rows()
            if collected:
                path = save_rows(collected, folder, name)
                error.add_note(f"What was collected before ({len(collected)} rollouts) is in {path}")
        except Exception as second:
            error.add_note(f"What was collected before could not be saved: {type(second).__name__}: {second}")
        raise


def place_of_failures(trainer: Any) -> tuple[Path, str]:
    """The folder, and the name of the file, of what this process collected for a trainer before a failure."""
    name = f"step{trainer.state.global_step}-rank{trainer.accelerator.process_index}"
    return Path(trainer.args.output_dir) / "salvaged", name
