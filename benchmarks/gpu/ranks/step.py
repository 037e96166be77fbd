"""Optimizer steps of ``TreeGRPOTrainer`` on this process's part of some groups, in one phase after another.

A phase is a way of running the same steps (execution, placement): one step that is not timed, then some that are.
"""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch as replaced

import torch
from datasets import Dataset
from torch import nn
from transformers import PrinterCallback, TrainerCallback

from benchmarks.gpu.ranks.backends import VARIANTS, WRAPPERS, allow_fsdp_on_cpu, backend_options
from benchmarks.gpu.ranks.rows import Rows
from benchmarks.gpu.whole import rollouts
from benchmarks.gpu.whole.step import RUNS, build, synchronise
from harts_hf import TreeGRPOConfig, TreeGRPOTrainer
from harts_hf.planner.execution import DUMMY
from harts_hf.runtime import WindowRun

WARM, TIMED = 1, 3
DRY_BUDGET = 128


@dataclass(frozen=True)
class Phase:
    """A way of running the steps.

    Attributes:
        execution: ``tree_execution``.
        placement: ``tree_placement``.
        variant: of :data:`benchmarks.gpu.ranks.backends.VARIANTS`.
    """

    execution: str = "replay"
    placement: str = "auto"
    variant: str = "plain"

    def enter(self, trainer: Any) -> Callable[[], None]:
        """Sets the trainer; the answer undoes what the variant did."""
        tree = trainer._tree
        tree.planner = replace(tree.planner, config=replace(tree.planner.config, execution=self.execution))
        trainer.args.tree_placement = self.placement
        return VARIANTS[self.variant](trainer)


class Steps(TrainerCallback):
    """Walks through the phases, and times.

    Attributes:
        seconds: of every step.
        inside: of every step's forwards and backwards.
        ops: of every step, what the cost model says of each forward and backward that ran here, in order.
        peaks: bytes allocated at most, of every step.
    """

    def __init__(self, phases: Sequence[Phase], *, dry: bool) -> None:
        self.phases, self.dry = phases, dry
        self.trainer: Any = None
        self.seconds: list[float] = []
        self.inside: list[float] = []
        self.ops: list[list[float]] = []
        self.peaks: list[int] = []
        self._runs: list[float] = []
        self._run: Any = None
        self._leave: Callable[[], None] = lambda: None

    def phase_of(self, step: int) -> Phase:
        return self.phases[step // (WARM + TIMED)]

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        step = len(self.seconds)
        if step % (WARM + TIMED) == 0:
            self._leave()
            self._leave = self.phase_of(step).enter(self.trainer)
        self._runs, self._run = [], None
        synchronise(self.dry)
        if not self.dry:
            torch.cuda.reset_peak_memory_stats()
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        self._begun = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        synchronise(self.dry)
        self.seconds.append(time.perf_counter() - self._begun)
        self.inside.append(sum(self._runs))
        self.ops.append(estimates(self._run))
        self.peaks.append(0 if self.dry else torch.cuda.max_memory_allocated())

    def watching(self) -> ExitStack:
        """Inside, runs of windows are timed."""
        stack = ExitStack()
        for name in RUNS:
            stack.enter_context(replaced.object(WindowRun, name, self._watch(getattr(WindowRun, name))))
        return stack

    def _watch(self, run: Any) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            synchronise(self.dry)
            begun = time.perf_counter()
            found = run(*args, **kwargs)
            synchronise(self.dry)
            self._runs.append(time.perf_counter() - begun)
            self._run = args[0]
            return found

        return watched


def estimates(run: Any) -> list[float]:
    """What the cost model says of each op that a rank ran, dummies too."""
    schedule, rank = run.window.schedule, run.window.rank
    numbers = [one.id for one in schedule.microbatches if rank is None or one.rank == rank]
    return [schedule.op_seconds((kind, DUMMY if index == DUMMY else numbers[index])) for kind, index in run._ops]


def built(name: str, *, dry: bool) -> nn.Module:
    """The model, with experts that all run at once (ranks would hang otherwise)."""
    model = build(name, dry)
    if dry:
        model.set_experts_implementation("batched_mm")  # type: ignore[operator]
    return model


def train(
    model: nn.Module, rows: Rows, phases: Sequence[Phase], backend: str, budget: int, *, dry: bool,
    more: Sequence[Any] = (), options: dict[str, Any] | None = None,
) -> tuple[TreeGRPOTrainer, Steps]:  # fmt: skip
    """All phases in one training; the trainer, for its log, and what was timed on this rank."""
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    count = len(rows.tokens)
    answer = rows.of_rank(rank, world)

    def reward(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(sum(ids) % 17) for ids in completion_ids]

    steps = Steps(phases, dry=dry)
    with tempfile.TemporaryDirectory() as folder:
        arguments = dict(
            output_dir=folder, per_device_train_batch_size=1, gradient_accumulation_steps=count // world,
            num_generations=count, steps_per_generation=count // world, max_completion_length=100000,
            learning_rate=1e-6, optim="sgd", max_steps=len(phases) * (WARM + TIMED), logging_steps=1,
            save_strategy="no", report_to="none", bf16=not dry, use_cpu=dry, disable_tqdm=True,
            gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False},
            dataloader_pin_memory=False, max_grad_norm=0.0, router_aux_loss_coef=0.0, beta=0.0,
            tree_max_tokens_per_microbatch=budget, tree_sharing="auto",
        )  # fmt: skip
        args = TreeGRPOConfig(**{**arguments, **backend_options(backend, dry=dry), **(options or {})})
        if dry and backend.startswith("fsdp2"):
            allow_fsdp_on_cpu()
        trainer = TreeGRPOTrainer(
            model, reward, args=args, rollout_func=lambda prompts, trainer: answer,
            processing_class=rollouts.tokenizer(), callbacks=[steps, *more],
            train_dataset=Dataset.from_dict({"prompt": [f"t{i}" for i in range(2, 20)]}),
        )  # fmt: skip
        steps.trainer = trainer
        trainer.remove_callback(PrinterCallback)
        with steps.watching():
            trainer.train()
    wrapper = type(trainer.model_wrapped).__name__
    if backend in WRAPPERS and wrapper != WRAPPERS[backend]:
        raise RuntimeError(f"expected {WRAPPERS[backend]} around the model of {backend}, got {wrapper}")
    return trainer, steps
