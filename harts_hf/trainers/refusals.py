"""What tree trainers refuse, by name, before any model is patched."""

import os
import warnings
from typing import Any

import trl
from accelerate.utils import DistributedType
from datasets import Dataset
from packaging.version import Version
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.training_args import OptimizerNames
from trl import GRPOTrainer

from harts_hf.errors import HartsWarning, UnsupportedModelError
from harts_hf.modeling.checkpointing import check_keys, checkpointed_every
from harts_hf.modeling.checks import REENTRANT_MESSAGE, check_experts, check_parallel_sizes
from harts_hf.modeling.patching import causal_lm_of
from harts_hf.trainers.acceleration import check_acceleration
from harts_hf.trainers.origins import is_from
from harts_hf.trainers.ranks import check_backend
from harts_hf.trainers.tree_options import check_optimizer
from harts_hf.trainers.weighing import UNITS
from harts_hf.trainers.zero3 import gathers_whole_layers

TRL_RANGE = ("1.16", "1.17")
LEVELS = ("token", "sequence")  # of GRPO's importance sampling


def check_trl_version() -> None:
    """Raises UnsupportedModelError outside the tested range of TRL."""
    low, high = TRL_RANGE
    if not Version(low) <= Version(trl.__version__) < Version(high):
        raise UnsupportedModelError(
            f"expected trl >= {low}, < {high} (its private hooks were tested there), got {trl.__version__}"
        )


_SAMPLED_BY = ("get_train_dataloader", "_get_train_sampler")
_READ_BY = ("get_train_dataloader", "_prepare_inputs", "_generate_and_score_completions")
# Where launchers write the number of processes (torchrun and accelerate, Open MPI, MPICH and Intel MPI, MVAPICH).
WORLD_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def check_processes(trainer: Any) -> None:
    """Refuses processes that train alone although more were started, and FSDP that was asked for and does not run.

    Accelerate (1.15) does both silently: without a GPU and without ``use_cpu=True`` each process that torchrun starts
    is alone, and on a CPU FSDP becomes DDP. ``accelerate launch`` with MULTI_CPU starts one process whatever
    ``num_processes`` says, and passes that number on nowhere; only its traces can be warned about.

    Raises:
        UnsupportedModelError: see above.
    """
    accelerator = trainer.accelerator
    world = accelerator.num_processes
    for name in WORLD_SIZES:
        asked = os.environ.get(name, "")
        if world == 1 and asked.isdigit() and int(asked) > 1:
            raise UnsupportedModelError(
                f"expected {asked} processes ({name}), got one that knows of no other, and they would all train the "
                "same: on a CPU set use_cpu=True, elsewhere see why torch finds no accelerator"
            )
    if trainer.args.fsdp and accelerator.distributed_type != DistributedType.FSDP:
        raise UnsupportedModelError(
            f"expected FSDP, as fsdp={trainer.args.fsdp!r} asks for, got {accelerator.distributed_type.value}: "
            "Accelerate runs FSDP on several processes with accelerators only"
        )
    by_accelerate = "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_PORT" in os.environ
    if world == 1 and by_accelerate and "RANK" not in os.environ:
        warnings.warn(
            "accelerate launch set an address for several processes and started one: with MULTI_CPU (--cpu) it "
            "ignores num_processes. Use torchrun, or --multi_gpu together with use_cpu=True",
            HartsWarning,
            stacklevel=4,
        )


def check_reference(model: Any, args: Any, *, is_adapted: bool) -> None:
    """Refuses a reference model that TRL could not load: it does so by the name that the policy was loaded by.

    Args:
        model: what the trainer was given for a policy.
        args: the trainer's arguments.
        is_adapted: whether it gets adapters, without which it is the reference itself.

    Raises:
        ValueError: see above.
    """
    name = getattr(getattr(model, "config", None), "_name_or_path", None)
    if getattr(args, "beta", 0) and name == "" and not is_adapted and not getattr(model, "peft_config", None):
        raise ValueError(
            f"expected a policy that was loaded with from_pretrained for beta={args.beta} (TRL loads the reference "
            "model from the same place), got a model that was made in memory: save it and load it, or set beta=0"
        )


def check_prompts(trainer: Any) -> None:
    """Refuses a data set without prompts, and one that fills no batch by TRL's sampler: Trainer would end at step 0.

    Raises:
        ValueError: no column ``prompt``, fewer prompts than one generation takes.
    """
    rows, args = trainer.train_dataset, trainer.args
    if not isinstance(rows, Dataset) or not hasattr(args, "generation_batch_size"):
        return
    if _is_stock(trainer, *_READ_BY) and "prompt" not in rows.column_names:
        raise ValueError(f"expected a train_dataset with the column prompt, got {', '.join(rows.column_names)}")
    if not _is_stock(trainer, *_SAMPLED_BY):
        return
    needed = args.generation_batch_size // args.num_generations
    if len(rows) < needed:
        raise ValueError(
            f"expected at least {needed} rows of train_dataset (generation_batch_size={args.generation_batch_size} / "
            f"num_generations={args.num_generations}), or no step can run, got {len(rows)}"
        )


def _is_stock(trainer: Any, *names: str) -> bool:
    """Whether these methods are TRL's or ours, and not a user's."""
    return all(is_from(getattr(type(trainer), name), "trl", "transformers", "harts_hf") for name in names)


def check_offload(trainer: Any) -> None:
    """Refuses activation checkpoints in pinned memory (``offload``) where there is no GPU that they would leave.

    Raises:
        ValueError: see above; PyTorch would say so in the first backward, when rollouts have been sampled.
    """
    args = trainer.args
    kwargs = args.activation_checkpointing_kwargs or {}
    is_dry_run = trainer.model.device.type == "meta"  # of a training that may run on a GPU elsewhere
    on_cpu = args.use_cpu or (trainer.accelerator.device.type == "cpu" and not is_dry_run)
    if on_cpu and args.activation_checkpointing and kwargs.get("offload"):
        raise ValueError(
            "expected a GPU for offload=True of activation_checkpointing_kwargs, which moves what layers keep into "
            "the CPU's memory, got a training on the CPU, where it is already: leave offload out"
        )


def check_settings(trainer: Any) -> None:
    """Refuses settings that the tree step would get wrong, before any model is patched."""
    args = trainer.args
    check_processes(trainer)
    check_backend(trainer.accelerator)
    check_acceleration(trainer)
    check_parallel_sizes(
        {"tensor": trainer.get_tp_size(), "context": trainer.get_cp_size(), "sequence": trainer.get_sp_size()}
    )
    by_module = is_deepspeed_zero3_enabled() and not gathers_whole_layers(trainer.model, trainer.accelerator)
    check_experts(causal_lm_of(trainer.model), zero3=by_module)
    kwargs = args.gradient_checkpointing_kwargs or {}
    check_keys(kwargs)
    checkpointed_every(kwargs)
    has_coefficient = getattr(trainer, "aux_loss_enabled", False)
    # They step inside the backward, so several times in a window of several microbatches.
    optimizers = [name for name in OptimizerNames if name.endswith(("lomo", "layerwise"))]
    # Of TRL's own loss, which says so only once rollouts have been sampled; a loss of one's own may have others.
    has_loss_types = getattr(type(trainer), "_compute_loss", None) is GRPOTrainer._compute_loss
    refused: list[tuple[bool, str, str]] = [
        (
            has_loss_types and args.loss_type not in UNITS,
            f"loss_type to be one of {', '.join(UNITS)}",
            f"{getattr(args, 'loss_type', None)!r}",
        ),
        (
            has_loss_types and args.importance_sampling_level not in LEVELS,
            f"importance_sampling_level to be one of {', '.join(LEVELS)}",
            f"{getattr(args, 'importance_sampling_level', None)!r}",
        ),
        (
            has_coefficient and trainer.router_loss == "refused",
            f"no auxiliary loss of the router in {type(trainer).__name__}, whose loss has no place for it",
            f"router_aux_loss_coef={getattr(trainer, 'router_aux_loss_coef', None)}: set router_aux_loss_coef=0 to "
            "train without it",
        ),
        (args.fp16, "bf16 or fp32 training (states would overflow in fp16)", "fp16=True"),
        (
            args.neftune_noise_alpha is not None,
            "equal embeddings of a shared token (NEFTune draws noise for every trajectory)",
            f"neftune_noise_alpha={args.neftune_noise_alpha}",
        ),
        (
            bool(getattr(args, "ddp_static_graph", False)),
            "DDP that finds out in each step what is used (a step has other microbatches than the one before)",
            "ddp_static_graph=True",
        ),
        (args.optim in optimizers, "an optimizer with a step of its own", f"optim={args.optim}"),
        (args.gradient_checkpointing and kwargs.get("use_reentrant", False), "", REENTRANT_MESSAGE),
    ]
    for wrong, expected, got in refused:
        if wrong:
            raise UnsupportedModelError(f"expected {expected}, got {got}" if expected else got)
    check_optimizer(args)
    if has_coefficient and trainer.router_loss == "absent":
        warnings.warn(
            f"router_aux_loss_coef={trainer.router_aux_loss_coef} has no effect: GMPO's loss has no auxiliary loss of "
            "the router, in TRL neither",
            HartsWarning,
            stacklevel=4,
        )
