"""What `harts train` checks before a model is loaded."""

import os
import sys
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME

from harts_hf.cli.checks import check_output_folder, refuse_to_overwrite
from harts_hf.cli.train_arguments import PolicyArguments, TrainArguments
from harts_hf.cli.train_report import REPORT_FILES
from harts_hf.trainers.checkpoints import newest_whole


def check_processes(arguments: TrainArguments, training: Any) -> None:
    """Raises ValueError where another number of processes runs than the recipe is meant for.

    ``accelerate launch`` starts a single one for ``distributed_type: MULTI_CPU``, whatever ``num_processes`` says.
    """
    wanted, running = arguments.num_processes, training.world_size
    if wanted is not None and wanted != running:
        file = arguments.accelerate_config or "FILE"
        raise ValueError(
            f"expected {wanted} processes (num_processes), got {running}: start them with `accelerate launch "
            f"--config_file {file} -m harts_hf.cli train RECIPE` (a single one, if the file says MULTI_CPU) or "
            f"`torchrun --nproc_per_node {wanted} -m harts_hf.cli train RECIPE`; --num_processes {running} trains "
            "with these, on batches of another size"
        )


def check_folders(training: Any, model: PolicyArguments, recipe: str | None, *, makes: bool = True) -> None:
    """Checks the output folder and the checkpoint to resume from.

    Args:
        training: the trainer's arguments.
        model: the recipe's.
        recipe: its file.
        makes: whether the output folder is made; if not, it is checked whether it could be.

    Raises:
        ValueError: an output that is an input, a folder that cannot be written, a checkpoint that is none.
    """
    refuse_to_overwrite(training.output_dir, model.model_name_or_path)
    for name in REPORT_FILES:
        refuse_to_overwrite(os.path.join(training.output_dir, name), recipe)
    check_output_folder("output_dir", training.output_dir, makes=makes)
    checkpoint = training.resume_from_checkpoint
    if str(checkpoint).lower() == "true":
        checkpoint = training.resume_from_checkpoint = _newest_whole(training.output_dir)
    if checkpoint is not None and not (Path(checkpoint) / TRAINER_STATE_NAME).is_file():
        raise ValueError(
            f"expected resume_from_checkpoint to be a checkpoint's folder (with {TRAINER_STATE_NAME}), "
            f"got {checkpoint!r}{_newest(training.output_dir)}"
        )


def _newest(folder: str) -> str:
    found = sorted(Path(folder).glob("checkpoint-*[0-9]"), key=lambda path: path.stat().st_mtime)
    return f"; the newest folder in output_dir is {str(found[-1])!r}" if found else ""


def _newest_whole(folder: str) -> str:
    """The checkpoint that ``resume_from_checkpoint true`` means; newer ones that are not whole are named."""
    whole, broken = newest_whole(Path(folder))
    passed_over = ", ".join(f"{name}: {missing}" for name, missing in broken.items())
    if whole is None:
        raise ValueError(
            f"expected a whole checkpoint in output_dir={folder!r} to resume from, got none"
            + (f" ({passed_over})" if passed_over else "")
        )
    print(f"resuming from {whole}" + (f"; passed over {passed_over}" if passed_over else ""), file=sys.stderr)
    return str(whole)
