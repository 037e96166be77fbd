"""The trainers that are compared: stock TRL, the same kernels without sharing, nested prefixes collapsed, the tree.

All sides train one set of parameters: each has a copy of the model's modules whose parameters and buffers are the same
tensors, so that what TRL, Accelerate and :func:`harts_hf.patch` put on a model stays on that side's.
"""

import copy
import tempfile
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from transformers import PrinterCallback
from trl import GRPOTrainer

from harts_hf.bench.clock import StepClock
from harts_hf.bench.collapsing import CollapsingPlanner
from harts_hf.bench.rollouts import StepRollouts
from harts_hf.bench.variants import (
    ScoringGRPOTrainer,
    ScoringSortedGRPOTrainer,
    ScoringTreeGRPOTrainer,
    SortedGRPOTrainer,
)
from harts_hf.trainers import TreeGRPOConfig, TreeGRPOTrainer
from harts_hf.trainers.slicing import MOST_ON_CPU

STOCK, SORTED, PACKED, COLLAPSED, TREE = "stock", "stock sorted", "packed", "collapsed", "tree"
KINDS = {
    STOCK: "TRL's GRPOTrainer as it is: rows padded to the longest of the step",
    SORTED: "the same, rows sorted by length and each batch padded to its own longest",
    PACKED: "the tree's kernels without sharing: rows packed without padding",
    COLLAPSED: "the same, but a trajectory that another begins with is not run",
    TREE: "tree training",
}
STOCK_KINDS = (STOCK, SORTED)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A kind of side and what it was run with.

    Attributes:
        kind: of :data:`KINDS`.
        size: rows of a batch (``per_device_train_batch_size``) of stock trainers; of the others, tokens of a
            microbatch (``tree_max_tokens_per_microbatch``).
        rows: of a batch of those others, which their microbatches do not depend on; :func:`rows_at_once` if None.
    """

    kind: str
    size: int
    rows: int | None = None

    @property
    def label(self) -> str:
        """Such as ``packed 16384``, or ``packed 16384/8`` of so many rows."""
        return f"{self.kind} {self.size}" + (f"/{self.rows}" if self.rows else "")


@dataclass(frozen=True, eq=False, kw_only=True)
class BenchStep:
    """The optimizer step that every side makes.

    Attributes:
        model: unpatched, on its device; it stays as it is.
        rollouts: of the step; with routes, sides of this package replay them.
        args: what all sides have in common (:func:`common_arguments`); of the tree's options, ``tree_sharing`` is the
            tree's only.
        tokenizer: of the trainers.
        optimizer: of an earlier side on the same model; a side makes a new one by ``args`` if None.
        old_log_probs: whether TRL scores old log-probs in the step.
    """

    model: nn.Module
    rollouts: StepRollouts
    args: TreeGRPOConfig
    tokenizer: Any
    optimizer: torch.optim.Optimizer | None = None
    old_log_probs: bool = False


@dataclass(eq=False, kw_only=True)
class Side:
    """A trainer and its clock.

    Attributes:
        setting: what it is.
        trainer: stock or tree.
        clock: of its steps.
        rows_per_batch: ``per_device_train_batch_size``.
        log: what the trainer logged of its latest step.
    """

    setting: Setting
    trainer: Any
    clock: StepClock
    rows_per_batch: int
    log: dict[str, Any] = field(default_factory=dict)

    def step(self) -> dict[str, Any]:
        """One optimizer step; what the trainer logs of it."""
        self.trainer.train()
        self.log = next(log for log in reversed(self.trainer.state.log_history) if "loss" in log)
        return self.log


_TRAINERS: dict[str, tuple[type, type]] = {
    STOCK: (GRPOTrainer, ScoringGRPOTrainer),
    SORTED: (SortedGRPOTrainer, ScoringSortedGRPOTrainer),
    PACKED: (TreeGRPOTrainer, ScoringTreeGRPOTrainer),
    COLLAPSED: (TreeGRPOTrainer, ScoringTreeGRPOTrainer),
    TREE: (TreeGRPOTrainer, ScoringTreeGRPOTrainer),
}


def build_side(setting: Setting, step: BenchStep) -> Side:
    """A trainer of one kind, whose every ``train()`` is the step.

    Args:
        setting: which one.
        step: what it trains.

    Raises:
        UnsupportedModelError, ValueError: what the trainer refuses.
    """
    is_stock = setting.kind in STOCK_KINDS
    rows_per_batch = setting.size if is_stock else setting.rows or rows_at_once(step.rollouts)
    rollouts = replace(step.rollouts, routes=None) if is_stock else step.rollouts  # stock trainers take none
    rollouts = rollouts.filled(rows_per_batch)
    count = len(rollouts.token_ids)
    tree_options: dict[str, Any] = {} if is_stock else {"tree_max_tokens_per_microbatch": setting.size}
    if setting.kind == PACKED:
        tree_options["tree_sharing"] = "never"
    if rollouts.routes is not None and not is_stock:
        tree_options["tree_replay_routing"] = "engine"
    own = replace(
        step.args, per_device_train_batch_size=rows_per_batch, gradient_accumulation_steps=count // rows_per_batch,
        steps_per_generation=count // rows_per_batch, generation_batch_size=None, num_generations=count,
        max_completion_length=max(map(len, rollouts.masks)), **tree_options,
    )  # fmt: skip
    clock = StepClock(torch.device(own.device))
    trainer = _TRAINERS[setting.kind][step.old_log_probs](
        twin(step.model), rollouts.reward_func(), own, train_dataset=Dataset.from_dict({"prompt": ["bench"] * 4}),
        processing_class=step.tokenizer, rollout_func=rollouts.rollout_func(), callbacks=[clock],
        optimizers=(step.optimizer, None),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    if not is_stock:
        trainer.tree_policy.budgets.begins_again = False  # a size that does not fit is a result
    if setting.kind == COLLAPSED:
        planner = trainer.tree_policy.planner
        trainer.tree_policy.planner = CollapsingPlanner(
            config=replace(planner.config, sharing="always"), vocab_size=planner.vocab_size
        )
    _keep_memory(trainer.accelerator)
    clock.watch(trainer)
    return Side(setting=setting, trainer=trainer, clock=clock, rows_per_batch=rows_per_batch)


def rows_at_once(rollouts: StepRollouts) -> int:
    """Rows of a batch of trainers whose microbatches do not depend on it: all, or in as few parts of equal size as
    have their losses computed on the CPU. A batch of one row costs as many operations as one of all."""
    count = len(rollouts.token_ids)
    most = max(1, MOST_ON_CPU // max(map(len, rollouts.masks)))
    return -(-count // -(-count // most))


def common_arguments(args: TreeGRPOConfig | None = None, **more: Any) -> TreeGRPOConfig:
    """Arguments of all sides: a training's, or TRL's defaults, but for what a benchmark has to say.

    The learning rate is 0: the optimizer does its work and the weights stay, so every step of every side is the same
    one, and results can be compared after any of them.
    """
    fixed: dict[str, Any] = dict(
        output_dir=tempfile.gettempdir(), learning_rate=0.0, max_steps=1, logging_steps=1, logging_strategy="steps",
        save_strategy="no", eval_strategy="no", report_to="none", disable_tqdm=True, dataloader_num_workers=0,
        generation_batch_size=None, log_completions=False, use_vllm=False, num_iterations=1, push_to_hub=False,
        lr_scheduler_type="constant", warmup_steps=0, mask_truncated_completions=False,
    )  # fmt: skip
    if args is None:
        fixed |= dict(per_device_train_batch_size=2, num_generations=2)
        return TreeGRPOConfig(**{**fixed, **more})
    fixed |= dict(per_device_train_batch_size=args.num_generations, gradient_accumulation_steps=1)
    return replace(args, **{**fixed, "steps_per_generation": 1, **more})


def twin(model: nn.Module) -> nn.Module:
    """A copy of a model's modules on the same parameters and buffers."""
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, shared)


def _keep_memory(accelerator: Any) -> None:
    """Each ``train()`` would give the GPU's memory back first, and the step that is timed would ask for it again."""

    def free_memory(*objects: Any) -> tuple[Any, ...]:
        accelerator._schedulers, accelerator._optimizers = [], []
        accelerator._models, accelerator._dataloaders = [], []
        accelerator.step = 0
        return objects

    accelerator.free_memory = free_memory
