"""Run by torchrun, or alone: the optimizer steps of one backend, whose result file rank 0 writes."""

import json
import os
import sys
from typing import Any

import torch

from benchmarks.gpu import record
from benchmarks.gpu.ranks.rows import Rows
from benchmarks.gpu.ranks.step import DRY_BUDGET, Phase, built, train
from benchmarks.gpu.ranks.summary import summaries
from benchmarks.gpu.registry import RANKS_BUDGET, RANKS_DIVISOR, RANKS_MODEL, RANKS_RUNS, SEED, STEP_WORKLOAD


def main(options: Any) -> None:
    """One of :data:`benchmarks.gpu.registry.RANKS_RUNS`, all its phases."""
    dry, world, run = options.dry_run, int(os.environ.get("WORLD_SIZE", 1)), RANKS_RUNS[options.what]
    if world != run.processes:
        raise SystemExit(f"expected {run.processes} processes for {options.what} (torchrun starts them), got {world}")
    torch.manual_seed(SEED)
    if not dry:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    model = built(RANKS_MODEL, dry=dry)
    rows = Rows.of(options.shapes, run.groups, model.config.vocab_size, RANKS_DIVISOR, dry=dry)
    budget = DRY_BUDGET if dry else RANKS_BUDGET
    trainer, steps = train(
        model, rows, [Phase(*phase.split(":")) for phase in run.phases], run.backend, budget, dry=dry
    )
    found = summaries(trainer, steps)
    if int(os.environ.get("RANK", 0)) == 0:
        kept = {
            "run": options.what, "model": RANKS_MODEL, "backend": run.backend, "processes": world,
            "workload": f"{STEP_WORKLOAD} {', '.join(map(str, run.groups))}", "trajectories": len(rows.tokens),
            "tokens": sum(map(len, rows.tokens)), "max_tokens_per_microbatch": budget,
        }  # fmt: skip
        record.write(options.out, {**record.about(), "failures": {}, "rows": [{**kept, **one} for one in found]})
        for one in found:
            print(json.dumps({name: value for name, value in one.items() if name != "tree"}), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        sys.stdout.flush()
        os._exit(0)  # nothing is left to do, and tearing down backends aborts now and then
