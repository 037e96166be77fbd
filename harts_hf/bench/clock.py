"""When a trainer's step spent its time, and what it held: a callback, and methods that are timed."""

import functools
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import TrainerCallback

# Phases of a step, in the order in which they are told.
PHASES = ("prepare", "old_log_probs", "planning", "forward_backward", "clipping", "optimizer", "other")
CLOCKS = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")


class StepClock(TrainerCallback):
    """Times the latest optimizer step, waiting for the GPU at the bounds of phases.

    Attributes:
        seconds: of the step: from its first batch to the zeroed gradients; fetching rollouts (which are played, not
            sampled) is part of it.
        phases: seconds by :data:`PHASES`: TRL's own work on rows, rewards and metrics; scoring old log-probs; planning
            (tree); forwards, backwards and losses; clipping and its norm; the optimizer; the rest.
        peak_memory: bytes allocated at most on a GPU; None on a CPU.
        clocks: what nvidia-smi says right after the step, by :data:`CLOCKS`; empty without it.
        on_gradients: called before the optimizer's step, outside what is timed.
        report: of the tree's update, until the next step begins; None of stock trainers.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = 0.0
        self.phases: dict[str, float] = {}
        self.peak_memory: int | None = None
        self.clocks: dict[str, float] = {}
        self.on_gradients: Any = None
        self.report: Any = None
        self._begun = self._paused = self._left = 0.0
        self._running: dict[str, float] = {}

    def watch(self, trainer: Any) -> None:
        """Times a trainer's methods from now on."""
        trainer._prepare_inputs = self._timed("prepare", trainer._prepare_inputs)
        trainer.training_step = self._timed("training_step", trainer.training_step)
        scores = trainer._get_per_token_logps_and_entropies
        timed = self._timed("old_log_probs", scores)

        @functools.wraps(scores)
        def scoring(*args: Any, **kwargs: Any) -> Any:
            return (scores if torch.is_grad_enabled() or not self.is_preparing else timed)(*args, **kwargs)

        trainer._get_per_token_logps_and_entropies = scoring
        if hasattr(trainer, "tree_policy"):
            step = trainer.tree_policy.step

            @functools.wraps(step)
            def reporting(*args: Any, **kwargs: Any) -> Any:
                self.report = step(*args, **kwargs)
                return self.report

            trainer.tree_policy.step = reporting

    @property
    def is_preparing(self) -> bool:
        """Whether TRL is at rows, rewards and old log-probs now."""
        return "prepare" in self._running

    def _timed(self, name: str, method: Any) -> Any:
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self._phase(name):
                return method(*args, **kwargs)

        return timed

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._running[name] = self._now()
        try:
            yield
        finally:
            spent = self._now() - self._running.pop(name)
            self.phases[name] = self.phases.get(name, 0.0) + spent

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.phases, self.report, self._paused = {}, None, 0.0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._begun = self._now()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        now = self._now()
        self.phases["clipping"] = now - self._begun - self.phases["training_step"]
        if self.on_gradients is not None:
            self.on_gradients()
            self._paused = self._now() - now
        self._left = self._now()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.phases["optimizer"] = self._now() - self._left

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds = self._now() - self._begun - self._paused
        found = {name: self.phases.get(name, 0.0) for name in PHASES}
        found["prepare"] -= found["old_log_probs"]
        found["planning"] = 0.0 if self.report is None else self.report.seconds["planning"]
        found["forward_backward"] = self.phases["training_step"] - self.phases["prepare"] - found["planning"]
        found["other"] = self.seconds - sum(found.values())
        self.phases = found
        if self.device.type == "cuda":
            self.peak_memory = torch.cuda.max_memory_allocated(self.device)
            self.clocks = gpu_clocks(self.device)


def gpu_clocks(device: torch.device) -> dict[str, float]:
    """MHz of multiprocessors and memory, degrees, watts; empty where nvidia-smi does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    command = [
        program,
        f"--query-gpu={','.join(CLOCKS)}",
        "--format=csv,noheader,nounits",
        f"--id={device.index or 0}",
    ]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        return dict(zip(CLOCKS, map(float, answer.strip().splitlines()[0].split(",")), strict=True))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return {}
