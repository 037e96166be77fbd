"""What of a generation batch and of the running metrics a checkpoint keeps, beside what TRL and Trainer save.

TRL (1.16) saves neither how far a generation batch has come nor its rollouts: a training that goes on from the middle
of one would generate the same prompts again, and mix up generation batches from then on.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

# What TRL's supervised trainer has seen; other trainers have it in Trainer's state.
_SUPERVISED_TOKENS = "_total_train_tokens"


def file_of(folder: Path, rank: int) -> Path:
    """The file of one process in a checkpoint."""
    return folder / f"harts_rank_{rank}.pt"


def save_generation(trainer: Any, folder: Path) -> str | None:
    """Saves this process's part of the generation batch, if it is not used up, and metrics that are not logged yet.

    Returns:
        Why the rollouts could not be saved: a batch with an entry that is neither a tensor, a number, a string nor
        made of these. None if they were, or are used up.
    """
    state: dict[str, Any] = {
        "micro_steps": trainer._step,
        "metrics": _plain(trainer._metrics["train"], "metrics"),
        "loss": float(trainer._tr_loss),
        "last_logged": trainer._globalstep_last_logged,
        "train_tokens": getattr(trainer, _SUPERVISED_TOKENS, 0),
        "rollouts": None,
    }
    reason = None
    try:
        state["rollouts"] = _plain(trainer._buffered_inputs, "rollouts") if is_in_generation(trainer) else None
    except TypeError as error:
        reason = str(error)
    torch.save(state, file_of(folder, trainer.args.process_index))
    return reason


def load_generation(trainer: Any, folder: Path) -> None:
    """Goes on in the generation batch and in the logging interval that a checkpoint was saved in.

    Called when Trainer has begun its loop, by all processes of as many as saved the checkpoint.
    """
    device = trainer.args.device
    on = "cpu" if device.type == "cpu" else device  # torch restores nothing to "cpu:0", a process's CPU under gloo
    state = torch.load(file_of(folder, trainer.args.process_index), map_location=on, weights_only=True)
    trainer._step = state["micro_steps"]
    trainer._buffered_inputs = state["rollouts"]
    trainer._metrics["train"] = defaultdict(list, state["metrics"])
    trainer._tr_loss = torch.tensor(state["loss"], device=device)
    trainer._globalstep_last_logged = state["last_logged"]
    if hasattr(trainer, _SUPERVISED_TOKENS):
        setattr(trainer, _SUPERVISED_TOKENS, state.get("train_tokens", 0))  # older checkpoints have none
    # The mean that Trainer logs at the end is over the steps since; this loss is of steps before.
    ranks = trainer.tree_policy.ranks
    total, _ = ranks.totals({"loss": state["loss"]}, {})
    trainer._total_loss_scalar -= total["loss"] / ranks.count


def is_in_generation(trainer: Any) -> bool:
    """Whether rollouts of the running generation batch are still to be trained on."""
    if trainer._buffered_inputs is None:
        return False
    generate_every = trainer.args.steps_per_generation * getattr(trainer, "num_iterations", 1)
    return bool(trainer._step % generate_every)


def _plain(value: Any, where: str) -> Any:
    """The same on the CPU, for ``torch.load`` with ``weights_only``."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: _plain(one, f"{where}[{key!r}]") for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, where) for one in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{where} holds a {type(value).__name__}, not only tensors, numbers and strings")
