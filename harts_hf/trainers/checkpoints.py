"""Which checkpoints are whole, and which a training can be resumed from."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

MARKER = "harts_checkpoint.json"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a checkpoint and the training that goes on from it have to agree on.

    Attributes:
        backend: how parameters lie in processes, and so in files.
        world_size: number of processes.
        batch_size: rows of a micro-step on one process.
        gradient_accumulation_steps: micro-steps of an optimizer step.
        steps_per_generation: slices of a generation batch; of supervised training, those of an optimizer step.
        num_iterations: how often each slice is trained on.
        num_generations: rollouts of a prompt; of supervised training, 1.
    """

    backend: str
    world_size: int
    batch_size: int
    gradient_accumulation_steps: int
    steps_per_generation: int
    num_iterations: int
    num_generations: int

    @property
    def prompts_per_step(self) -> float:
        """Prompts that an optimizer step moves on in the data."""
        rows = self.world_size * self.batch_size * self.gradient_accumulation_steps
        return rows / (self.num_generations * self.num_iterations)

    @property
    def generate_every(self) -> int:
        """Micro-steps that a generation batch lasts."""
        return self.steps_per_generation * self.num_iterations

    @classmethod
    def of(cls, trainer: Any) -> "Facts":
        """Those of a trainer."""
        args = trainer.args
        return cls(
            backend=_backend_of(trainer.accelerator),
            world_size=trainer.accelerator.num_processes,
            batch_size=args.per_device_train_batch_size,
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            steps_per_generation=getattr(args, "steps_per_generation", args.gradient_accumulation_steps),
            num_iterations=getattr(args, "num_iterations", 1),
            num_generations=getattr(args, "num_generations", 1),
        )


def _backend_of(accelerator: Any) -> str:
    state = accelerator.state
    kind = accelerator.distributed_type.value
    if kind == "FSDP":
        return f"FSDP{state.fsdp_plugin.fsdp_version} with {state.fsdp_plugin.state_dict_type.name}"
    if kind == "DEEPSPEED":
        return f"ZeRO-{state.deepspeed_plugin.zero_stage}"
    return "DDP or one process"


def begin(folder: Path) -> None:
    """Marks a checkpoint as half-written, before anything of it is."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder, {"complete": False})


def finish(
    folder: Path, facts: Facts, *, micro_steps: int, with_optimizer: bool, without_rollouts: str | None = None
) -> None:
    """Marks a checkpoint as whole, after everything of it was written by every process.

    Args:
        folder: the checkpoint.
        facts: of the training.
        micro_steps: that it has done.
        with_optimizer: False if only the model was saved.
        without_rollouts: why rollouts that are still to be trained on are not there; None if they are.
    """
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in _files(folder)}
    _write(
        folder,
        {
            "complete": True,
            "micro_steps": micro_steps,
            "with_optimizer": with_optimizer,
            "without_rollouts": without_rollouts,
            "training": asdict(facts),
            "bytes": sizes,
        },
    )


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MARKER)


def _write(folder: Path, content: dict[str, Any]) -> None:
    """All of it or nothing: a kill leaves the file as it was."""
    unfinished = folder / f"{MARKER}.{os.getpid()}"
    unfinished.write_text(json.dumps(content, indent=1) + "\n")
    unfinished.replace(folder / MARKER)


def read(folder: Path) -> dict[str, Any] | None:
    """The marker of a checkpoint; None where there is none, as in those of other trainers."""
    path = folder / MARKER
    return json.loads(path.read_text()) if path.is_file() else None


def what_is_missing(folder: Path) -> str | None:
    """What a checkpoint lacks to be whole; None if nothing does."""
    marker = read(folder)
    if marker is not None:
        if not marker["complete"]:
            return "it is half-written (the training ended while it was saved)"
        for name, size in marker["bytes"].items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes instead of {size}"
        return None
    try:  # of another trainer, which writes this last
        json.loads((folder / TRAINER_STATE_NAME).read_text())
    except (OSError, ValueError):
        return f"{TRAINER_STATE_NAME} is missing or broken"
    return None


def newest_whole(output_dir: Path) -> tuple[Path | None, dict[str, str]]:
    """The newest whole checkpoint below a folder, and what newer ones lack, by their names."""
    steps = {}
    for path in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        number = path.name.rpartition("-")[2]
        if path.is_dir() and number.isdigit():
            steps[int(number)] = path
    broken: dict[str, str] = {}
    for step in sorted(steps, reverse=True):
        missing = what_is_missing(steps[step])
        if missing is None:
            return steps[step], broken
        broken[steps[step].name] = missing
    return None, broken


def check_resumable(folder: Path, now: Facts, *, keeps_data_order: bool, universal: bool = False) -> None:
    """Refuses a checkpoint that this training would go on from differently, before anything is loaded.

    Args:
        folder: the checkpoint.
        now: of the training that is to go on.
        keeps_data_order: whether it goes on where the data was left (not with ``ignore_data_skip``).
        universal: whether DeepSpeed is told to load a checkpoint for any number of processes.

    Raises:
        ValueError: a checkpoint that is no folder, not whole or without an optimizer; another backend; another number
            of processes or other batches where that cannot be.
    """
    if not folder.is_dir():
        raise ValueError(f"expected a checkpoint's folder to resume from, got {str(folder)!r}")
    missing = what_is_missing(folder)
    if missing is not None:
        before, _ = newest_whole(folder.parent)
        hint = "" if before is None else f"; the newest whole one beside it is {str(before)!r}"
        raise ValueError(f"expected a whole checkpoint to resume from, got {str(folder)!r}: {missing}{hint}")
    marker = read(folder)
    if marker is None:
        _check_foreign(folder, now)
        return
    if not marker["with_optimizer"]:
        raise ValueError(
            f"expected a checkpoint with an optimizer, got {str(folder)!r}, saved with save_only_model=True: its "
            "model can start a new training"
        )
    then = Facts(**marker["training"])
    if then.backend != now.backend:
        raise ValueError(f"expected a checkpoint of {now.backend}, got one of {then.backend}: its files are others")
    done = marker["micro_steps"] % then.generate_every
    if done and marker["without_rollouts"] is not None:
        raise ValueError(
            f"expected a checkpoint at the end of a generation batch ({then.generate_every} micro-steps) or with its "
            f"rollouts, got {str(folder)!r}, {done} micro-steps into one: {marker['without_rollouts']}"
        )
    if done:
        _check_same(then, now, done)
    if then.world_size != now.world_size and now.backend.startswith("ZeRO") and not universal:
        raise ValueError(
            f"expected {then.world_size} processes, as when the checkpoint was saved, got {now.world_size}: DeepSpeed "
            'does not split an optimizer anew (unless the checkpoint is made universal, and {"checkpoint": '
            '{"load_universal": true}} stands in its configuration)'
        )
    if keeps_data_order and then.prompts_per_step != now.prompts_per_step:
        raise ValueError(
            f"expected {then.prompts_per_step:g} prompts per optimizer step, as when the checkpoint was saved, got "
            f"{now.prompts_per_step:g}: which prompts come next is counted in steps. Change "
            "gradient_accumulation_steps and steps_per_generation with the number of processes, or set "
            "ignore_data_skip=True to begin the data anew"
        )


def _check_foreign(folder: Path, now: Facts) -> None:
    """Of another trainer, which saves no rollouts."""
    step = json.loads((folder / TRAINER_STATE_NAME).read_text())["global_step"]
    done = step * now.gradient_accumulation_steps % now.generate_every
    if done:
        raise ValueError(
            f"expected a checkpoint at the end of a generation batch ({now.generate_every} micro-steps), got "
            f"{str(folder)!r}, {done} micro-steps into one, without its rollouts"
        )


def _check_same(then: Facts, now: Facts, done: int) -> None:
    """In the middle of a generation batch, whose rows lie with the processes that generated them."""
    before, after = asdict(then), asdict(now)
    for name, value in before.items():
        if after[name] != value:
            raise ValueError(
                f"expected {name}={value}, as when the checkpoint was saved, got {after[name]}: it was saved "
                f"{done} micro-steps into a generation batch of {then.generate_every}, whose rollouts belong to these "
                "settings; resume from one at the end of a generation batch to change them"
            )
