"""Checkpoints of tree trainers: saved whole or not at all, and resumed where they were left."""

import warnings
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import transformers.trainer
from accelerate.utils import DistributedType, broadcast_object_list
from safetensors import safe_open
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
from transformers.utils import CONFIG_NAME
from trl.trainer.utils import RepeatSampler

from harts_hf.errors import HartsWarning
from harts_hf.trainers.checkpoints import Facts, begin, check_resumable, finish, newest_whole, read
from harts_hf.trainers.generation import load_generation, save_generation
from harts_hf.trainers.replacing import replaced


class TreeCheckpoints:
    """Mixin above a TRL trainer, for what its checkpoints lack.

    A checkpoint holds the generation batch that it falls into and what was not logged yet, of each process; it counts
    as whole when every process has written everything, and only then are older ones deleted.
    """

    # What TRL's trainer and TreeHooks set.
    model: Any
    args: Any
    accelerator: Any
    state: Any
    _step: int
    _tree: Any

    _train_sampler: Any = None
    _without_rollouts: str | None = None  # why the latest checkpoint has none

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Trainer's. ``True`` resumes from the newest *whole* checkpoint in ``output_dir``.

        Raises:
            ValueError: a checkpoint that is half-written, or that this training would go on from differently (see
                :func:`harts_hf.trainers.checkpoints.check_resumable`).
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self._newest_whole()
        if resume_from_checkpoint:
            folder, now = Path(resume_from_checkpoint), Facts.of(self)
            plugin = getattr(self.accelerator.state, "deepspeed_plugin", None)
            universal = plugin is not None and plugin.deepspeed_config.get("checkpoint", {}).get(
                "load_universal", False
            )
            check_resumable(folder, now, keeps_data_order=not self.args.ignore_data_skip, universal=universal)
        parent: Any = super()
        return parent.train(resume_from_checkpoint, *args, **kwargs)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's, remembered until the training begins."""
        parent: Any = super()
        self._train_sampler = parent._get_train_sampler(*args, **kwargs)
        return self._train_sampler

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Trainer's; brings TRL's sampler to the epoch that is resumed.

        TRL (1.16) draws the order of the prompts of each epoch from one generator, whose state no checkpoint has: a
        training that is resumed in its second epoch would have the order of the first again.
        """
        parent: Any = super()
        epochs, steps = parent._init_training_state(*args, **kwargs)
        sampler = self._train_sampler
        if isinstance(sampler, RepeatSampler) and sampler.shuffle:
            for _ in range(epochs):
                torch.randperm(sampler.num_samples, generator=sampler.generator)
        self._train_sampler = None
        return epochs, steps

    def _newest_whole(self) -> str:
        """Of process 0, for all; says which newer ones were passed over."""
        folder, broken = newest_whole(Path(self.args.output_dir))
        found: list[Any] = [None if folder is None else str(folder), broken]
        if self.accelerator.num_processes > 1:
            broadcast_object_list(found)
        whole, broken = found
        passed_over = ", ".join(f"{name}: {missing}" for name, missing in broken.items())
        if whole is None:
            raise ValueError(
                f"expected a whole checkpoint in {self.args.output_dir!r} to resume from, got none"
                + (f" ({passed_over})" if passed_over else "")
            )
        if passed_over:
            warnings.warn(
                f"resuming from {whole}, the newest whole checkpoint; passed over {passed_over}",
                HartsWarning,
                stacklevel=3,
            )
        return str(whole)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Trainer's; deletes and uploads when everything is written."""
        parent: Any = super()
        trainer: Any = self
        run_dir = trainer._get_output_dir(trial=trial)
        folder = Path(run_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.should_save:
            begin(folder)
        self.accelerator.wait_for_everyone()
        limit = self.args.save_total_limit
        with (
            replaced(self.args, "save_total_limit", None),
            replaced(self, "_push_from_checkpoint", lambda folder: None),
        ):
            parent._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            with_optimizer = not self.args.save_only_model
            finish(
                folder,
                Facts.of(self),
                micro_steps=self._step,
                with_optimizer=with_optimizer,
                without_rollouts=self._without_rollouts,
            )
            rotate_checkpoints(run_dir, limit, self.state.best_model_checkpoint, use_mtime=True)
        if self.args.push_to_hub:
            trainer._push_from_checkpoint(str(folder))

    def _save_rng_state(self, output_dir: str) -> None:
        """Trainer's, which saves what belongs to one process."""
        parent: Any = super()
        parent._save_rng_state(output_dir)
        self._without_rollouts = save_generation(self, Path(output_dir))
        if self._without_rollouts is not None:
            warnings.warn(
                f"this checkpoint falls into a generation batch and cannot be resumed: {self._without_rollouts}",
                HartsWarning,
                stacklevel=2,
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """TRL's. FSDP2 (torch 2.13) fails to load a whole state dict of an optimizer without state, such as SGD
        without momentum: there is nothing to load but the learning rates, which the scheduler has."""
        parent: Any = super()
        trainer: Any = self
        if checkpoint is None or not trainer.is_fsdp_enabled or not _is_stateless(trainer.optimizer):
            parent._load_optimizer_and_scheduler(checkpoint)
            return
        with replaced(transformers.trainer, "load_fsdp_optimizer", lambda *args, **kwargs: None):
            parent._load_optimizer_and_scheduler(checkpoint)
        rates = trainer.lr_scheduler.get_last_lr()
        for group, rate in zip(trainer.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Trainer's, which loads what belongs to one process, once, before the first step."""
        parent: Any = super()
        parent._load_rng_state(checkpoint)
        if checkpoint is None:
            return
        marker = read(Path(checkpoint))
        trainer: Any = self
        if marker is not None and Facts(**marker["training"]) == Facts.of(self):
            load_generation(self, Path(checkpoint))
        else:  # at the end of a generation batch
            trainer._step, trainer._buffered_inputs = 0, None

    def _load_best_model(self) -> None:
        """Trainer's, but whole models are loaded with the names that they were saved under."""
        parent: Any = super()
        if not self._loads_itself(self.model, self.state.best_model_checkpoint):
            parent._load_best_model()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Trainer's, but whole models are loaded with the names that they were saved under."""
        parent: Any = super()
        target = self.model if model is None else model
        if not self._loads_itself(target, resume_from_checkpoint):
            parent._load_from_checkpoint(resume_from_checkpoint, model)

    def _loads_itself(self, target: Any, folder: str) -> bool:
        sharded = self.accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
        return not sharded and not hasattr(target, "peft_config") and load_weights(target, folder)


def _is_stateless(optimizer: Any) -> bool:
    inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
    return isinstance(inner, torch.optim.SGD) and not any(group["momentum"] for group in inner.param_groups)


def load_weights(model: Any, folder: str) -> bool:
    """Loads a checkpoint as ``from_pretrained`` does, strictly, into ``model``; every tensor as it was saved.

    Transformers saves several families under the names of their hub checkpoints (experts one by one, other
    prefixes). ``from_pretrained`` translates them; ``Trainer`` (5.24) loads them by name, not strictly, and leaves
    what it does not find at its initial value.

    Args:
        model: a Transformers model, not wrapped.
        folder: the checkpoint.

    Returns:
        False where the folder holds no whole model of its own (an adapter, shards of a backend): nothing was loaded.
    """
    if not (Path(folder) / CONFIG_NAME).is_file() or not list(Path(folder).glob("model*.safetensors")):
        return False
    # One dtype for all of a mixed model's tensors: the widest, from which each is rounded back to what was saved.
    tensors = [tensor for tensor in model.state_dict().values() if tensor.is_floating_point()]
    widest = reduce(torch.promote_types, {tensor.dtype for tensor in tensors})
    state = type(model).from_pretrained(folder, dtype=widest).state_dict()
    # Modules that were added to the model (a value head) are unknown to its class, and saved by their names, also in
    # files of their own.
    added = model.state_dict().keys() - state.keys()
    for path in Path(folder).glob("*.safetensors") if added else ():
        with safe_open(path, "pt") as tensors_of_file:
            state |= {name: tensors_of_file.get_tensor(name) for name in added & set(tensors_of_file.keys())}
    model.load_state_dict(state, strict=True)
    return True
