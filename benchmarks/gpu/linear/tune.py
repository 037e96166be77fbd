"""The state kernels alone: their inputs, and times of their widths.

Gate per head or channel, 32 or 16 heads, one long chain or many short ones.
"""

import argparse
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.gpu import record
from benchmarks.gpu.measure import median_ms
from benchmarks.gpu.registry import LINEAR_KINDS, LinearKind
from benchmarks.gpu.trees import Forest, fork_layout, unshared
from harts_hf.kernels.linear_attention.fla_tables import ChainGroup, build_packed_chains
from harts_hf.planner.chunks import CHUNK_SIZE

WIDTHS = {"forward": (16, 32, 64), "backward": (16, 32)}


def state_kernels(kind: LinearKind, forest: Forest) -> Callable[..., None]:
    """``run(direction, width, write_slots=True)`` of random inputs, all chains as one group."""
    from harts_hf.kernels.linear_attention.triton_states import run_states_backward, run_states_forward

    tables = forest.linear_tables().to("cuda")
    chains: ChainGroup = build_packed_chains(tables, np.zeros(0, np.int64), 0, group_size=10**9).groups[0]
    positions, dim, value_heads = chains.positions[1], kind.dim, kind.value_heads

    def rand(heads: int) -> torch.Tensor:
        return torch.randn(1, positions, heads, dim, device="cuda").bfloat16() * 0.1

    q, k = rand(kind.heads), rand(kind.heads)
    w, u, do, dv = (rand(value_heads) for _ in range(4))
    gate = torch.rand(1, positions, value_heads, *([dim] if kind.kimi else []), device="cuda") * -3
    slots = torch.zeros(chains.num_slots, value_heads, dim, dim, device="cuda")

    def run(direction: str, width: int, write_slots: bool = True) -> None:
        shared = {"chunk_size": CHUNK_SIZE, "block_v": width}
        if direction == "forward":
            run_states_forward(k, w, u, gate, slots, chains, write_slots=write_slots, **shared)
        else:
            run_states_backward(q, k, w, gate, do, dv, torch.zeros_like(slots), chains, scale=0.1, **shared)

    return run


def main(options: argparse.Namespace) -> None:
    """Every width of every kind, in both directions."""
    found = []
    for kind in LINEAR_KINDS.values():
        for name, forest in (("long", unshared(32768)), ("short", fork_layout(64, 128, 256))):
            run = state_kernels(kind, forest)
            for direction, widths in WIDTHS.items():
                times = {width: median_ms(lambda w=width, d=direction: run(d, w), 5, 1) for width in widths}  # noqa: B023
                label = f"{'kda' if kind.kimi else 'gdn'}-{kind.value_heads} {name} {direction}"
                print(label, {width: round(time, 3) for width, time in times.items()}, flush=True)
                found.append({"case": label, "times": times})
    record.write(options.out, {**record.about(), "rows": found})
