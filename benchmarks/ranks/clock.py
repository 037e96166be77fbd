"""Steps of several ranks, each by its side, timed on every rank; what is written after each of them."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch as replaced

import torch
from transformers import TrainerCallback

from benchmarks.gathering import of_ranks
from benchmarks.gpu.registry import RUNS
from benchmarks.ranks.jobs import Step
from benchmarks.ranks.models import trained
from benchmarks.ranks.sketches import Sketch, gradient_of, sketch, value_of
from harts_hf.planner.execution import DUMMY
from harts_hf.runtime import WindowRun

LATE = 2  # the step in which a process is killed


class Steps(TrainerCallback):
    """Has each step taken by its side, times it, and keeps what every rank says of it.

    Args:
        steps: of the job.
        rate: learning rate of steps that move weights; all others leave them.
        save: called on rank 0 with what there is so far, after every step.
        kill: if given, the file that rank 1 writes right before it kills itself, within a backward.
        sketches: whether gradients are kept.

    Attributes:
        found: of every step: side, role, ``seconds``, ``inside`` (forwards and backwards), ``ops`` and
            ``op_seconds`` by rank; bytes: ``held`` before the step, ``with_gradients`` after its last backward,
            ``peaks``; and what the trainer logs.
        gradients: sketches by the label of the side, of its first step.
        parameters: sketches ``before`` the first step that moves weights and ``after`` the last.
    """

    def __init__(
        self, steps: Sequence[Step], *, rate: float, save: Callable[["Steps"], None], kill: Path | None = None,
        sketches: bool = True,
    ) -> None:  # fmt: skip
        self.steps, self.rate, self.save, self.kill, self.sketches = steps, rate, save, kill, sketches
        self.trainer: Any = None
        self.found: list[dict[str, Any]] = []
        self.gradients: dict[str, Sketch] = {}
        self.parameters: dict[str, Sketch] = {}
        self._device = torch.device("cpu")
        self._runs: list[float] = []
        self._op_seconds: list[float] = []
        self._run: Any = None
        self._held = self._with_gradients = self._peak = 0
        self._paused = self._begun = 0.0
        self._number = 0

    @property
    def step(self) -> Step:
        """The one that is being taken."""
        return self.steps[self._number]

    def progress(self, job: str) -> dict[str, Any]:
        """For a result file: whether all steps were taken; if not, that is a failure of the job until they are."""
        finished = len(self.found) == len(self.steps)
        return {"finished": finished, "failures": {} if finished else {job: "not finished"}}

    # ---- callbacks --------------------------------------------------------------------------------------------------

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._device = self.trainer.args.device
        engine = getattr(self.trainer.accelerator, "deepspeed_engine_wrapped", None)
        if engine is not None:  # it steps by itself, within the last backward
            stock = engine.engine.step

            def stepping(*args: Any, **kwargs: Any) -> Any:
                self._note_gradients()
                return stock(*args, **kwargs)

            engine.engine.step = stepping

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        step = self.step
        if step.role == "moved" and "before" not in self.parameters:
            self.parameters["before"] = sketch(trained(self.trainer.model), value_of)
        for group in self.trainer.optimizer.param_groups:
            group["lr"] = self.rate if step.role == "moved" else 0.0
        if step.side.kind != "stock":
            tree = self.trainer.tree_policy
            sharing = "never" if step.side.kind == "packed" else "auto"
            config = replace(tree.planner.config, sharing=sharing, max_tokens_per_microbatch=step.side.size)
            tree.planner = replace(tree.planner, config=config)
        self._runs, self._op_seconds, self._run, self._paused = [], [], None, 0.0
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self._held = torch.cuda.memory_allocated()
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        self._begun = self._now()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        if getattr(self.trainer.accelerator, "deepspeed_engine_wrapped", None) is None:
            self._note_gradients()

    def _note_gradients(self) -> None:
        """Of a side's first step, outside what is timed."""
        begun = self._now()
        if self._device.type == "cuda":
            self._peak = torch.cuda.max_memory_allocated()
            self._with_gradients = torch.cuda.memory_allocated()
        if self.sketches and self.step.side.label not in self.gradients:
            self.gradients[self.step.side.label] = sketch(trained(self.trainer.model), gradient_of)
        self._paused = self._now() - begun

    def on_step_end(self, *_: Any, **__: Any) -> None:
        step, seconds = self.step, self._now() - self._begun - self._paused
        mine = {
            "seconds": seconds, "inside": sum(self._runs), "peaks": self._peak, "ops": estimates(self._run),
            "op_seconds": self._op_seconds, "held": self._held, "with_gradients": self._with_gradients,
        }  # fmt: skip
        ranks = of_ranks(mine)
        by_rank = {name: [rank[name] for rank in ranks] for name in mine}
        self.found.append({"side": step.side.label, "kind": step.side.kind, "role": step.role, **by_rank})
        if step.role == "moved" and self._number + 1 == len(self.steps):
            self.parameters["after"] = sketch(trained(self.trainer.model), value_of)
        self._number += 1

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs is None or "loss" not in logs:
            return
        tree = {name.removeprefix("tree/"): value for name, value in logs.items() if name.startswith("tree/")}
        self.found[-1] |= {"tree": tree, **{name: logs.get(name) for name in ("loss", "entropy", "grad_norm")}}
        self.save(self)

    # ---- forwards and backwards -------------------------------------------------------------------------------------

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, runs of windows are timed; their ops too, in steps of the role "ops"."""
        with ExitStack() as stack:
            for name in RUNS:
                stack.enter_context(replaced.object(WindowRun, name, self._timed(getattr(WindowRun, name))))
            for name in ("_forward", "_backward"):
                stack.enter_context(replaced.object(WindowRun, name, self._op(name, getattr(WindowRun, name))))
            yield

    def _timed(self, run: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = self._now()
            found = run(*args, **kwargs)
            self._runs.append(self._now() - begun)
            self._run = args[0]
            return found

        return timed

    def _op(self, name: str, op: Any) -> Any:
        def timed(run: Any, position: int, *args: Any) -> Any:
            is_late = name == "_backward" and self._number + 1 == LATE
            if self.kill is not None and is_late and torch.distributed.get_rank() == 1:
                self.kill.write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            if self.step.role != "ops":
                return op(run, position, *args)
            begun = self._now()
            found = op(run, position, *args)
            if not (name == "_backward" and position + 1 == len(run._ops)):  # where DDP waits for all
                self._op_seconds.append(self._now() - begun)
            return found

        return timed

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def estimates(run: Any) -> list[tuple[float, bool]]:
    """What the cost model says of each op that this rank ran, and whether it was a dummy; none of stock trainers."""
    if run is None:
        return []
    schedule, rank = run.window.schedule, run.window.rank
    numbers = [one.id for one in schedule.microbatches if rank is None or one.rank == rank]
    return [
        (schedule.op_seconds((kind, DUMMY if index == DUMMY else numbers[index])), index == DUMMY)
        for kind, index in run._ops
    ]
