"""A trainer of one job on this process."""

import tempfile
from collections.abc import Sequence
from typing import Any

from datasets import Dataset
from torch import nn
from transformers import PrinterCallback
from trl import GRPOTrainer

from benchmarks.ranks.backends import WRAPPERS, allow_fsdp_on_cpu, backend_options
from benchmarks.ranks.clock import Steps
from benchmarks.ranks.rows import part_of
from harts_hf.bench.rollouts import StepRollouts
from harts_hf.bench.sides import common_arguments
from harts_hf.bench.subject import word_tokenizer
from harts_hf.trainers import TreeGRPOConfig, TreeGRPOTrainer


def arguments(
    rollouts: StepRollouts, backend: str, world: int, steps: int, *, exact: bool, dry: bool, budget: int,
    rows: int, placement: str = "auto", hollow: bool = False,
) -> TreeGRPOConfig:  # fmt: skip
    """Of the trainers; the learning rate is set step by step.

    Args:
        rollouts: of a step, all ranks'.
        backend: of :data:`benchmarks.ranks.jobs.BACKENDS`.
        world: ranks.
        steps: of the training.
        exact: float32; else bfloat16.
        dry: on a CPU.
        budget: rows of a microbatch.
        rows: of a rank's batch, which divide a rank's; TRL pads them to the longest of a generation.
        placement: ``tree_placement``.
        hollow: whether FSDP2 is given a model without memory, whose shards are filled afterwards.
    """
    count = len(rollouts.token_ids)
    options = backend_options(backend, dry=exact)
    if hollow:
        options["fsdp_config"]["cpu_ram_efficient_loading"] = True
    return common_arguments(
        output_dir=tempfile.mkdtemp(prefix="harts_ranks_"), per_device_train_batch_size=rows,
        gradient_accumulation_steps=count // world // rows, steps_per_generation=count // world // rows,
        num_generations=count, max_completion_length=max(map(len, rollouts.masks)), learning_rate=1.0,
        optim="sgd", max_steps=steps, bf16=not exact, use_cpu=dry, gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False}, dataloader_pin_memory=False, max_grad_norm=0.0,
        router_aux_loss_coef=0.0, beta=0.0, tree_max_tokens_per_microbatch=budget, tree_sharing="auto",
        tree_placement=placement, **options,
    )  # fmt: skip


def train(
    model: nn.Module, rollouts: StepRollouts, args: TreeGRPOConfig, steps: Steps, *, rank: int, world: int,
    stock: bool, backend: str, more: Sequence[Any] = (),
) -> Any:  # fmt: skip
    """Takes all steps; the trainer.

    Raises:
        RuntimeError: the model is not wrapped as the backend says, so that another one would have been measured.
    """
    mine = part_of(rollouts, rank, world)
    if args.use_cpu and backend.startswith("fsdp2"):
        allow_fsdp_on_cpu()
    trainer = (GRPOTrainer if stock else TreeGRPOTrainer)(
        model, mine.reward_func(), args=args, rollout_func=mine.rollout_func(), processing_class=word_tokenizer(),
        callbacks=[steps, *more], train_dataset=Dataset.from_dict({"prompt": ["ranks"] * 4}),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    if not stock:
        trainer.tree_policy.budgets.begins_again = False  # a size that does not fit is a result
    steps.trainer = trainer
    with steps.watching():
        trainer.train()
    wrapper = type(trainer.model_wrapped).__name__
    if wrapper != WRAPPERS.get(backend, type(model).__name__):
        raise RuntimeError(f"expected {WRAPPERS.get(backend)} around the model of {backend}, got {wrapper}")
    return trainer
