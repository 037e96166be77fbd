"""One process of a job: run by torchrun or accelerate launch, or alone; rank 0 writes the result after each step."""

import argparse
import faulthandler
import os
import signal
import sys
import warnings
from typing import Any

import torch

from benchmarks.gpu import record
from benchmarks.gpu.registry import SEED
from benchmarks.ranks import large
from benchmarks.ranks.clock import Steps
from benchmarks.ranks.jobs import WORKLOADS, Job, Side, Step
from benchmarks.ranks.model import bounds
from benchmarks.ranks.models import NAME, build, configuration
from benchmarks.ranks.rows import rollouts_of, rows_at_once
from benchmarks.ranks.training import arguments, train
from harts_hf.planner import PlannerConfig

DRY_DIVISOR, DRY_SMALLEST = 128, 64  # of budgets
# Of steps that move weights: enough that they move by more than a bfloat16 weight rounds.
RATE = 1.0


def dry_steps(steps: list[Step]) -> list[Step]:
    """The same in small microbatches, at most two timed steps a side."""
    small = {
        side: side if side.kind == "stock" else Side(side.kind, max(DRY_SMALLEST, side.size // DRY_DIVISOR))
        for side, _ in steps
    }
    found: list[Step] = []
    for side, role in steps:
        if role != "timed" or found.count(Step(small[side], role)) < 2:
            found.append(Step(small[side], role))
    return found


def main(options: argparse.Namespace) -> None:
    """Runs this process's part of a job."""
    job, dry = Job.parse(options.job), options.dry_run
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world != job.processes:
        raise SystemExit(f"expected {job.processes} processes for {job.name} (torchrun starts them), got {world}")
    faulthandler.register(signal.SIGUSR1)  # into the log: where a job was when its time was over
    warnings.simplefilter("ignore", FutureWarning)
    torch.manual_seed(SEED)
    if dry:
        _without_compiling()
    else:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if job.kind == "large":
        finish(large.run(job, options, rank=rank, world=world))
        return
    exact = job.is_exact or dry
    config = configuration(None, parity=job.kind.startswith("parity"), dry=dry)
    dtype = torch.float32 if exact else torch.bfloat16
    model = build(config, device="cpu" if dry else "cuda", dtype=dtype)
    rollouts = rollouts_of(job.workload, options.shapes, config.vocab_size, dry=dry)
    plan = dry_steps(job.steps) if dry else job.steps
    budget = max(
        (side.size for side, _ in plan if side.kind != "stock"), default=PlannerConfig.max_tokens_per_microbatch
    )
    rows = job.sides[0].size if job.kind == "stock" else rows_at_once(rollouts, world)
    content = {
        **record.about(), **about(job), "model": NAME, "layers": config.num_hidden_layers,
        "dtype": str(dtype).removeprefix("torch."), "trajectories": len(rollouts.token_ids), "rows_per_batch": rows,
        "tokens": rollouts.num_tokens, "unique_tokens": rollouts.tree.num_tokens,
    }  # fmt: skip
    if rank == 0:
        content["bounds"] = bounds(rollouts.tree, PlannerConfig(max_tokens_per_microbatch=budget), world)

    def save(steps: Steps) -> None:
        if rank == 0:
            parts = {"gradients": steps.gradients, "parameters": steps.parameters, "steps": steps.found}
            record.write(options.out, {**content, **steps.progress(job.name), **parts})
            last = steps.found[-1]
            print(last["side"], last["role"], f"{max(last['seconds']):.3f} s, loss {last['loss']:.6f}", flush=True)

    kill = options.out.with_suffix(".killed") if job.kind == "kill" else None
    if kill is not None:
        options.out.with_suffix(f".{rank}.pid").write_text(str(os.getpid()))
    steps = Steps(plan, rate=RATE, save=save, kill=kill, sketches=kill is None)
    args = arguments(
        rollouts, job.backend, world, len(plan), exact=exact, dry=dry, budget=budget, rows=rows,
        # Rows of all ranks on all ranks is what may go wrong.
        placement="global" if job.kind.startswith("parity") else "auto",
    )  # fmt: skip
    finish(train(model, rollouts, args, steps, rank=rank, world=world, stock=job.kind == "stock", backend=job.backend))


def about(job: Job) -> dict[str, Any]:
    """What a result file says of its job."""
    groups = WORKLOADS[job.workload].groups
    return {
        "job": job.name, "kind": job.kind, "backend": job.backend, "processes": job.processes,
        "workload": job.workload, "shapes": WORKLOADS[job.workload].shapes, "groups": groups or "all",
    }  # fmt: skip


def finish(trainer: Any) -> None:
    """Ends the process: nothing is left to do, and tearing down backends aborts now and then."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        sys.stdout.flush()
        os._exit(0)


def _without_compiling() -> None:
    """DeepSpeed's sums over shared memory, for which it compiles two minutes on a new machine."""
    try:
        import deepspeed
    except ImportError:
        return
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
