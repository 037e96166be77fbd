"""Whole optimizer steps of ``TreeGRPOTrainer`` on whole models: seconds beside a floor, and what they go to.

One process builds a model of random weights and takes the rows of :data:`benchmarks.gpu.registry.STEP_ROWS` one after
another: a step that compiles, three that are timed, one under the profiler, and if asked one under Python's.
"""

import argparse
import cProfile
import gc
import gzip
import json
import pstats
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch as replaced

import numpy as np
import torch
from datasets import Dataset
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoConfig, AutoModelForCausalLM, PrinterCallback, TrainerCallback

from benchmarks.gpu import record
from benchmarks.gpu.registry import DRY_EXPERTS, RUNS, SEED, STEP_MODELS, STEP_ROWS, STEP_WORKLOAD, TINY, StepRow
from benchmarks.gpu.trees import draw_tokens
from benchmarks.gpu.whole import rollouts
from benchmarks.gpu.whole.breakdown import INSIDE, breakdown, events_of
from benchmarks.gpu.whole.floor import Machine, floor_seconds, measure_machine, per_row
from harts_hf import RolloutTree, TreeGRPOConfig, TreeGRPOTrainer
from harts_hf.bench.variants import ScoringTreeGRPOTrainer
from harts_hf.runtime import WindowRun
from harts_hf.trainers.scored_once import ScoredOnce

WARM, TIMED, TIMED_OF_SLOW = 1, 3, 1  # steps; another is profiled
DRY_LAYERS, DRY_TOKENS, DRY_ROWS = 4, 200, 4


def build(name: str, dry: bool) -> nn.Module:
    """In bf16 on the GPU; if ``dry``, few and tiny layers in float32 on the CPU."""
    family, whole = STEP_MODELS[name]
    torch.manual_seed(SEED)
    if dry:
        kinds = whole["layer_types"][:DRY_LAYERS]
        cut = {key: value for key, value in {**TINY, **DRY_EXPERTS, "vocab_size": 512}.items() if key in whole}
        config = AutoConfig.for_model(
            family, **{**whole, **cut, "num_hidden_layers": DRY_LAYERS, "layer_types": kinds}
        )
        return AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    with torch.device("cuda"):
        config = AutoConfig.for_model(family, **whole)
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")


def group(shapes: Path, number: int, vocab: int) -> tuple[list[np.ndarray], list[int]]:
    """Trajectories of random tokens in the shape of one group, and how many of each one's last tokens are scored."""
    with gzip.open(shapes / f"{STEP_WORKLOAD}.jsonl.gz", "rt") as lines:
        shape = json.loads(list(lines)[number])
    rows = draw_tokens(RolloutTree.from_shape(shape["parent"], shape["length"], shape["sample_node"]), vocab)
    own = [shape["length"][node] for node in shape["sample_node"]]
    return rows, [min(max(1, length), len(row) - 1) for length, row in zip(own, rows, strict=True)]


class Clock(TrainerCallback):
    """Times steps; profiles one after those that are timed, and Python in the one after that.

    Attributes:
        seconds: of each step.
        profile: of the GPU.
        host: of Python.
    """

    def __init__(self, dry: bool, profiled: int) -> None:
        self.dry, self.profiled = dry, profiled
        self.seconds: list[float] = []
        self.profile = profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (not dry))
        self.host = cProfile.Profile()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        synchronise(self.dry)
        if len(self.seconds) == self.profiled:
            self.profile.__enter__()
        if len(self.seconds) > self.profiled:
            torch.autograd.set_multithreading_enabled(False)  # Python sees its own thread alone
            self.host.enable()
        self._begun = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        synchronise(self.dry)
        self.host.disable()
        torch.autograd.set_multithreading_enabled(True)
        self.seconds.append(time.perf_counter() - self._begun)
        if len(self.seconds) == self.profiled + 1:
            self.profile.__exit__(None, None, None)

    def functions(self) -> dict[str, list[list[Any]]]:
        """Where Python's time went: function, calls, seconds of its own and with what it calls; largest first."""
        found: Any = pstats.Stats(self.host).stats  # type: ignore[attr-defined]
        rows = [
            [f"{'/'.join(Path(file).parts[-3:])}:{line} {name}", calls, round(own, 4), round(all, 4)]
            for (file, line, name), (_, calls, own, all, _) in found.items()
        ]
        return {"own": sorted(rows, key=lambda r: -r[2])[:80], "all": sorted(rows, key=lambda r: -r[3])[:120]}


def synchronise(dry: bool) -> None:
    """Waits for the GPU, if there is one."""
    if not dry:
        torch.cuda.synchronize()


class Watched:
    """What runs of windows did within a step.

    Attributes:
        seconds: of each run's forwards and backwards.
        labels: rows of the head that a backward had.
    """

    def __init__(self, dry: bool) -> None:
        self.dry = dry
        self.seconds: list[float] = []
        self.labels = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, :class:`WindowRun` is watched."""
        with ExitStack() as stack:
            for name in RUNS:
                stack.enter_context(replaced.object(WindowRun, name, self._watch(getattr(WindowRun, name))))
            yield

    def _watch(self, run: Any) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if len(args) > 1 and hasattr(args[1], "rows"):
                self.labels = max(self.labels, int((args[1].rows["log_prob"] != 0).sum()))
            synchronise(self.dry)
            begun = time.perf_counter()
            with record_function(INSIDE):
                found = run(*args, **kwargs)
                synchronise(self.dry)
            self.seconds.append(time.perf_counter() - begun)
            return found

        return watched


def measure(
    model: nn.Module, name: str, row: StepRow, shapes: Path, dry: bool, machine: Machine, fused: str, host: bool
) -> dict:
    """One row of the record."""
    trajectories, scored = group(shapes, row.group, model.config.vocab_size)
    if dry:
        trajectories, scored = [one[:DRY_TOKENS] for one in trajectories[:DRY_ROWS]], [20] * DRY_ROWS
    pairs, count = list(zip(trajectories, scored, strict=True)), len(trajectories)

    rollouts_played = {
        "prompt_ids": [one[:-own].tolist() for one, own in pairs],
        "completion_ids": [one[-own:].tolist() for one, own in pairs],
        "logprobs": [[-1.0] * own for _, own in pairs],
    }

    def play(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        return dict(rollouts_played)

    def reward(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(sum(ids) % 17) for ids in completion_ids]

    model.gradient_checkpointing_disable()
    timed_steps = TIMED_OF_SLOW if row.slow else TIMED
    steps = WARM + timed_steps + 1 + host
    clock, watched = Clock(dry, WARM + timed_steps), Watched(dry)
    batches = 1 if row.together else count
    trainer_class = ScoringTreeGRPOTrainer if row.old else TreeGRPOTrainer
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        if row.old == "again":
            stack.enter_context(replaced.object(ScoredOnce, "weights", lambda *_: None))
        trainer = trainer_class(
            model, reward, rollout_func=play, processing_class=rollouts.tokenizer(), callbacks=[clock],
            train_dataset=Dataset.from_dict({"prompt": [f"t{i}" for i in range(2, 20)]}),
            args=TreeGRPOConfig(
                output_dir=folder, per_device_train_batch_size=count // batches, gradient_accumulation_steps=batches,
                num_generations=count, steps_per_generation=batches, max_completion_length=100000, learning_rate=1e-6,
                optim="sgd", max_steps=steps, logging_steps=1, save_strategy="no", report_to="none", bf16=not dry,
                use_cpu=dry, disable_tqdm=True, gradient_checkpointing=row.checkpointing, dataloader_pin_memory=False,
                max_grad_norm=0.0, router_aux_loss_coef=0.0, beta=0.0,
                gradient_checkpointing_kwargs={"use_reentrant": False} if row.checkpointing else None,
                tree_max_tokens_per_microbatch=row.budget, tree_sharing=row.sharing, **fused_option(fused),
            ),
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        if not dry:
            torch.cuda.reset_peak_memory_stats()
        with watched.watching():
            trainer.train()
    logs = trainer.state.log_history[-2]
    runs = len(watched.seconds) // steps  # of WindowRun in a step: one, or two where it scores first
    timed = slice(WARM, WARM + timed_steps)
    both = [sum(watched.seconds[step * runs : (step + 1) * runs]) for step in range(steps)]
    seconds, inside = statistics.median(clock.seconds[timed]), statistics.median(both[timed])
    found = breakdown(events_of(clock.profile))
    result = {
        "model": name,
        "workload": f"{STEP_WORKLOAD} {row.group}",
        "checkpointing": row.checkpointing,
        "sharing": row.sharing,
        "fused_modules": fused,
        "budget": row.budget,
        **({"rows_per_batch": count} if row.together else {}),
        **({"old_log_probs": row.old, "scoring_kept": logs["tree/scoring_kept"]} if row.old else {}),
        "max_tokens_per_microbatch": int(logs.get("tree/max_tokens_per_microbatch", row.budget)),
        "microbatches": logs["tree/microbatches"],
        "trajectories": count,
        "tokens": sum(map(len, trajectories)),
        "rows": logs["tree/backward_tokens"],
        "scored_first": runs > 1,
        "seconds": seconds,
        "seconds_of_steps": clock.seconds[: WARM + timed_steps],
        "forward_backward_seconds": inside,
        "bookkeeping_share": 1 - inside / seconds,
        "planning_seconds": logs["tree/planning_seconds"],
        "loss": logs["loss"],
        "entropy": logs["entropy"],
        "peak_memory": 0 if dry else torch.cuda.max_memory_allocated(),
        **found,
        **({"host": clock.functions(), "host_seconds": clock.seconds[-1]} if host else {}),
    }
    floor = floor_seconds(
        per_row(model), machine, rows=round(result["rows"]), labels=watched.labels,
        microbatches=round(result["microbatches"]), parameters=sum(p.numel() for p in model.parameters()),
        checkpointing=row.checkpointing,
        measured=sum(found["kernels_ms"].get(kind, 0.0) for kind in ("attention", "rule")) / 1e3,
    )  # fmt: skip
    return {**result, "floor": floor, "floor_seconds": floor["total"], "over_floor": inside / floor["total"]}


def fused_option(fused: str) -> dict[str, str]:
    """The trainer's option, where it has one."""
    return {"tree_fused_modules": fused} if hasattr(TreeGRPOConfig, "tree_fused_modules") else {}


def main(options: argparse.Namespace) -> None:
    """Row after row; what a row finds is written at once."""
    dry = options.dry_run
    machine = Machine(operations=1e12, bytes=1e11) if dry else measure_machine()
    begun = time.monotonic()
    model = build(options.what, dry)
    print(f"built in {time.monotonic() - begun:.0f} s", flush=True)
    result = {**record.about(), "machine": vars(machine), "failures": {}, "rows": []}
    for fused in options.fused:
        for name in options.rows:
            begun = time.monotonic()
            try:
                found = measure(
                    model, options.what, STEP_ROWS[name], options.shapes, dry, machine, fused, options.host
                )
                result["rows"].append(found)
                print(summary(name, found), f"({time.monotonic() - begun:.0f} s)", flush=True)
            except Exception:
                result["failures"][f"{name} {fused}"] = record.failure()
            model.zero_grad(set_to_none=True)
            gc.collect()
            if not dry:
                torch.cuda.empty_cache()
            record.write(options.out, result)


def summary(name: str, found: dict[str, Any]) -> str:
    """One line of a row."""
    kinds = ", ".join(f"{kind} {ms:.0f}" for kind, ms in sorted(found["kernels_ms"].items(), key=lambda i: -i[1]))
    return (
        f"{name} fused={found['fused_modules']}: step {found['seconds']:.3f} s, forward and backward "
        f"{found['forward_backward_seconds']:.3f} s ({found['over_floor']:.2f} of {found['floor_seconds']:.3f}), "
        f"launches {found['launches']}, waits {found['synchronisations']} "
        f"({found['synchronisations_inside']} inside), "
        f"idle {found['idle_ms']:.0f} ms, peak {found['peak_memory'] / 1e9:.1f} GB; ms of {kinds}"
    )
