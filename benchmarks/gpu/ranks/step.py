"""Run by torchrun, or alone: optimizer steps of ``TreeGRPOTrainer`` on some groups, in one phase after another.

A phase is a way of running the same steps (execution, placement): one step that is not timed, then some that are. Ranks
leave the seconds of each step, and of its forwards and backwards, the slowest rank's; rank 0 writes them with what the
trainer logged.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch as replaced

import numpy as np
import torch
from datasets import Dataset
from torch import nn
from transformers import PrinterCallback, TrainerCallback

from benchmarks.gpu import record
from benchmarks.gpu.ranks.backends import WRAPPERS, allow_fsdp_on_cpu, backend_options
from benchmarks.gpu.registry import SEED
from benchmarks.gpu.whole import rollouts
from benchmarks.gpu.whole.step import RUNS, build, group, synchronise
from harts_hf import TreeGRPOConfig, TreeGRPOTrainer
from harts_hf.runtime import WindowRun

WARM, TIMED = 1, 2
DRY_TOKENS, DRY_ROWS, DRY_BUDGET = 160, 6, 512


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A way of running the steps.

    Attributes:
        name: of the phase.
        execution: ``tree_execution``.
        placement: ``tree_placement``.
        apply: called with the trainer on entry; what it returns, if anything, on leaving.
    """

    name: str
    execution: str = "replay"
    placement: str = "auto"
    apply: Callable[[Any], Callable[[], None] | None] = lambda trainer: None

    def enter(self, trainer: Any) -> Callable[[], None]:
        """Sets the trainer; the answer undoes what :attr:`apply` did."""
        tree = trainer._tree
        tree.planner = replace(tree.planner, config=replace(tree.planner.config, execution=self.execution))
        trainer.args.tree_placement = self.placement
        return self.apply(trainer) or (lambda: None)


@dataclass(frozen=True, eq=False)
class Rows:
    """Trajectories of random tokens in the shapes of some groups, and how many last tokens of each are scored.

    Attributes:
        tokens: of every trajectory, group after group; as many as the processes divide.
        scored: of each.
    """

    tokens: list[np.ndarray]
    scored: list[int]

    @classmethod
    def of(cls, shapes: Path, groups: Sequence[int], vocab: int, world: int, *, dry: bool) -> "Rows":
        """Groups share no prefix: each token is moved by its group's number, and stays within the vocabulary."""
        tokens: list[np.ndarray] = []
        scored: list[int] = []
        for place, number in enumerate(groups):
            trajectories, own = group(shapes, number, vocab)
            if dry:
                trajectories, own = [one[:DRY_TOKENS] for one in trajectories[:DRY_ROWS]], [20] * DRY_ROWS
            tokens += [2 + (one - 2 + place) % (vocab - 2) for one in trajectories]
            scored += own
        keep = len(tokens) - len(tokens) % world
        return cls(tokens[:keep], scored[:keep])

    def of_rank(self, rank: int, world: int) -> dict[str, list[Any]]:
        """What a rollout function of one rank answers: its part of the rows, one after another."""
        mine = slice(rank * len(self.tokens) // world, (rank + 1) * len(self.tokens) // world)
        pairs = list(zip(self.tokens[mine], self.scored[mine], strict=True))
        return {
            "prompt_ids": [one[:-own].tolist() for one, own in pairs],
            "completion_ids": [one[-own:].tolist() for one, own in pairs],
            "logprobs": [[-1.0] * own for _, own in pairs],
        }


class Steps(TrainerCallback):
    """Walks through the phases, and times.

    Attributes:
        seconds: of every step.
        inside: of every step's forwards and backwards.
        peaks: bytes allocated at most, of every step.
    """

    def __init__(self, phases: Sequence[Phase], *, dry: bool) -> None:
        self.phases, self.dry = phases, dry
        self.trainer: Any = None
        self.seconds: list[float] = []
        self.inside: list[float] = []
        self.peaks: list[int] = []
        self._runs: list[float] = []
        self._leave: Callable[[], None] = lambda: None

    def phase_of(self, step: int) -> Phase:
        return self.phases[step // (WARM + TIMED)]

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        step = len(self.seconds)
        if step % (WARM + TIMED) == 0:
            self._leave()
            self._leave = self.phase_of(step).enter(self.trainer)
        self._runs = []
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
            return found

        return watched


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
            tree_max_tokens_per_microbatch=budget, tree_sharing="always",
        )  # fmt: skip
        args = TreeGRPOConfig(**{**arguments, **backend_options(backend, dry=dry), **(options or {})})
        if dry and backend == "fsdp2":
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


def slowest(values: list[float]) -> list[float]:
    """The largest of each over the ranks."""
    if not torch.distributed.is_initialized():
        return values
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, values)
    return [max(ranks) for ranks in zip(*found, strict=True)]


def summaries(trainer: Any, steps: Steps) -> list[dict[str, Any]]:
    """One for each phase; a collective."""
    seconds, inside, peaks = slowest(steps.seconds), slowest(steps.inside), slowest(steps.peaks)  # type: ignore
    logs = [log for log in trainer.state.log_history if "loss" in log]
    found = []
    for place, phase in enumerate(steps.phases):
        first, end = place * (WARM + TIMED), (place + 1) * (WARM + TIMED)
        log = logs[end - 1]
        found.append({
            "phase": phase.name, "execution": phase.execution, "placement": phase.placement,
            "seconds": min(seconds[first + WARM : end]), "seconds_of_steps": seconds[first:end],
            "forward_backward_seconds": min(inside[first + WARM : end]),
            "forward_backward_seconds_of_steps": inside[first:end],
            "peak_memory": max(peaks[first + WARM : end]),
            **{name: log.get(name) for name in ("loss", "entropy", "grad_norm")},
            "tree": {name: value for name, value in log.items() if name.startswith("tree/")},
        })  # fmt: skip
    return found


def main(options: Any) -> None:
    """One backend."""
    dry, world = options.dry_run, int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(SEED)
    if not dry:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    model = built(options.what, dry=dry)
    rows = Rows.of(options.shapes, options.groups, model.config.vocab_size, options.divides or world, dry=dry)
    phases = [Phase(name=" ".join(pair.split(":")), execution=pair.split(":")[0], placement=pair.split(":")[1])
              for pair in options.phases]  # fmt: skip
    trainer, steps = train(model, rows, phases, options.backend, DRY_BUDGET if dry else options.budget, dry=dry)
    found = summaries(trainer, steps)
    if int(os.environ.get("RANK", 0)) == 0:
        result = {
            **record.about(), "model": options.what, "backend": options.backend, "world": world,
            "groups": options.groups, "trajectories": len(rows.tokens), "tokens": sum(map(len, rows.tokens)),
            "max_tokens_per_microbatch": options.budget, "phases": found,
        }  # fmt: skip
        record.write(options.out, result)
        for one in found:
            print(json.dumps({name: value for name, value in one.items() if name != "tree"}), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        os._exit(0)  # nothing is left to do, and tearing down backends aborts now and then
