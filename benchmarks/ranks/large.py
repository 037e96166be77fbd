"""Ling-3.0-flash (124 B) on several GPUs: how many of its layers fit, a step on them, and what 64 GPUs would do.

Nothing here holds the model whole: under ZeRO-3 each parameter is shared out as it is made, under FSDP2 shards are
drawn where they stay.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch as replaced

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from benchmarks.gpu import record
from benchmarks.ranks.clock import Steps
from benchmarks.ranks.jobs import Job, Side, Step
from benchmarks.ranks.models import FLASH, flash_configuration, with_whole_experts
from benchmarks.ranks.rows import rollouts_of, rows_at_once
from benchmarks.ranks.training import arguments, train
from harts_hf.cli.dry_run.memory import Memory, memory_of
from harts_hf.cli.launching import Launch
from harts_hf.forest import concatenate_trees
from harts_hf.planner import PlannerConfig, count_world, plan_window
from harts_hf.runtime.budgets import MARGIN, parse_bytes
from harts_hf.tree import RolloutTree

BUDGET = 16384
BACKENDS = {"zero3": "ZeRO-3", "fsdp2": "FSDP2"}
INIT_STD = 0.02


def memory_for(layers: int, backend: str, gpus: int, *, dry: bool) -> Memory:
    """What a step takes of each GPU, as ``harts train --dry-run`` has it, with SGD in bfloat16 and checkpointing."""
    # FSDP2 keeps float32 weights, which Accelerate makes of any; ZeRO-3 float32 masters beside bfloat16.
    dtype = torch.bfloat16 if backend == "zero3" else torch.float32
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(flash_configuration(layers, dry=dry), dtype=dtype)
    training = SimpleNamespace(
        bf16=True, fp16=False, optim="sgd", gradient_checkpointing=True, gradient_checkpointing_kwargs=None,
        tree_fused_modules="auto", tree_offload_handoff=False,
    )  # fmt: skip
    launch = Launch(
        num_processes=gpus, backend=BACKENDS[backend], said_by="benchmarks.ranks", mixed_precision="bf16",
        gradient_bytes=2 if backend == "zero3" else None,
    )  # fmt: skip
    return memory_of(model, training, launch, with_reference=False)


def fitting(tree: RolloutTree, backend: str, gpus: int, room: float, *, budget: int, dry: bool) -> dict[str, Any]:
    """The most layers whose step fits into ``room`` bytes of each GPU but for a tenth, and their memory by part.

    Args:
        tree: of the step.
        backend: of :data:`BACKENDS`.
        gpus: that share the model.
        room: bytes of each.
        budget: rows of a microbatch.
        dry: tiny widths.

    Raises:
        ValueError: not even one layer fits.
    """
    schedule = plan_window(tree, PlannerConfig(max_tokens_per_microbatch=budget, world_size=gpus, execution="replay"))

    def peak(layers: int) -> float:
        return memory_for(layers, backend, gpus, dry=dry).peak(schedule)

    low, high = 0, flash_configuration(None, dry=dry).num_hidden_layers
    while low < high:  # as far as low fits
        middle = (low + high + 1) // 2
        low, high = (middle, high) if peak(middle) <= room * (1 - MARGIN) else (low, middle - 1)
    if not low:
        raise ValueError(
            f"expected room for a layer beside embedding and head ({peak(1):,.0f} bytes), got {room:,.0f}"
        )
    memory = memory_for(low, backend, gpus, dry=dry)
    return {
        "layers": low,
        "whole": flash_configuration(None, dry=dry).num_hidden_layers,
        "predicted_peak": memory.peak(schedule),
        "predicted": {part.name: part.bytes for part in memory.parts(schedule)},
        "exchanged_bytes": count_world(schedule, num_values=2).exchanged_bytes,
    }


def simulated(tree: RolloutTree, *, budget: int = BUDGET) -> list[dict[str, float]]:
    """What the planner's model says of 8 and 64 GPUs, once and with eight times as many groups on 64.

    Its seconds are those of Ling-3.0-tiny; a larger model's rows take longer, all by about the same factor. What
    sharded weights cost is not in them (docs/gpu.md: FSDP2 has 0.88, ZeRO-3 0.81 of its gain on two GPUs).
    """
    rows = []
    for gpus, copies in ((8, 1), (64, 1), (64, 8)):
        forest = concatenate_trees([tree] * copies)
        one = plan_window(forest, PlannerConfig(max_tokens_per_microbatch=budget)).estimated_seconds
        schedule = plan_window(forest, PlannerConfig(max_tokens_per_microbatch=budget, world_size=gpus))
        world = count_world(schedule, num_values=2)
        path = RolloutTree.from_shape([-1], [int(tree.trajectory_lengths.max())], [0])
        longest = plan_window(path, PlannerConfig(max_tokens_per_microbatch=budget)).estimated_seconds
        step = schedule.estimated_seconds
        rows.append({
            "gpus": gpus, "copies": copies, "speedup": one / step, "of_bound": max(one / gpus, longest) / step,
            "balance": world.balance, "rows_per_unique": world.tokens_per_unique, "dummies": world.dummies,
            "ops": world.ops, "exchanged_bytes": world.exchanged_bytes,
        })  # fmt: skip
    return rows


def run(job: Job, options: argparse.Namespace, *, rank: int, world: int) -> Any:
    """A step that is not timed and one that is, on this process's part; rank 0 writes the result."""
    dry = options.dry_run
    vocab = flash_configuration(None, dry=dry).vocab_size
    rollouts = rollouts_of(job.workload, options.shapes, vocab, dry=dry)
    budget = BUDGET // 128 if dry else BUDGET
    room = parse_bytes("--memory", options.memory) if options.memory else float(torch.cuda.mem_get_info()[1])
    fits = fitting(rollouts.tree, job.backend, world, room, budget=budget, dry=dry)
    side = Side("tree", budget)
    plan = [Step(side, step.role) for step in job.steps]
    args = arguments(
        rollouts,
        job.backend,
        world,
        len(plan),
        exact=dry,
        dry=dry,
        budget=budget,
        rows=rows_at_once(rollouts, world),
        hollow=job.backend == "fsdp2",
    )
    config = flash_configuration(fits["layers"], dry=dry)
    dtype = torch.float32 if dry else torch.bfloat16
    if job.backend == "fsdp2":
        model, sharing = _hollow(config, dtype), _drawn_where_it_stays()
    else:  # TrainingArguments that say ZeRO-3 have every new parameter shared out
        model, sharing = AutoModelForCausalLM.from_config(config, dtype=dtype), nullcontext()
    with_whole_experts(model, "cpu" if dry else "cuda")

    def save(steps: Steps) -> None:
        if rank == 0:
            record.write(options.out, {
                **record.about(), "job": job.name, "kind": job.kind, "backend": job.backend, "processes": world,
                "workload": job.workload, "model": FLASH, "parameters": _count(model), "budget": budget, **fits,
                **steps.progress(job.name), "steps": steps.found,
            })  # fmt: skip

    steps = Steps(plan, rate=0.0, save=save, sketches=False)
    with sharing:
        return train(
            model, rollouts, args, steps, rank=rank, world=world, stock=False, backend=job.backend,
        )  # fmt: skip


def _count(model: nn.Module) -> int:
    return sum(int(getattr(p, "ds_numel", p.numel())) for p in model.parameters())


def _hollow(config: Any, dtype: torch.dtype) -> nn.Module:
    """A model whose parameters have no memory; its buffers do."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")


@contextmanager
def _drawn_where_it_stays() -> Iterator[None]:
    """Inside, Accelerate fills FSDP2's shards with random numbers, where it would send rank 0's whole weights."""
    from accelerate.utils import fsdp_utils

    def draw(accelerator: Any, model: nn.Module, full: Any, **_: Any) -> None:
        torch.manual_seed(accelerator.process_index)
        drawn = {name: _drawn(tensor, accelerator.device) for name, tensor in model.state_dict().items()}
        model.load_state_dict(drawn, assign=True)

    with replaced.object(fsdp_utils, "fsdp2_load_full_state_dict", draw):
        yield


def _drawn(hollow: Any, device: torch.device) -> torch.Tensor:
    """A parameter's or buffer's shard: matrices random, scales 1, buffers 0."""
    local = hollow.to_local() if isinstance(hollow, DTensor) else hollow
    found = torch.empty(local.shape, dtype=local.dtype, device=device)
    if not isinstance(hollow, DTensor):
        return found.zero_()
    found.normal_(std=INIT_STD) if hollow.ndim > 1 else found.fill_(1.0)
    return DTensor.from_local(
        found, hollow.device_mesh, hollow.placements, run_check=False, shape=hollow.shape, stride=hollow.stride()
    )
