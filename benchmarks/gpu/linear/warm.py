"""Compiles our own kernels at full size into Triton's cache on disk."""

import argparse

import torch

from benchmarks.gpu.compare import cu_seqlens
from benchmarks.gpu.linear.layers import expanded_mixer, make_layer, pin_norm, tree_mixer
from benchmarks.gpu.linear.timing import step
from benchmarks.gpu.linear.tune import WIDTHS, state_kernels
from benchmarks.gpu.registry import LINEAR_KINDS
from benchmarks.gpu.trees import fork_layout


def main(options: argparse.Namespace) -> None:
    """State kernels of every width, then a layer, ours and the baseline."""
    forest = fork_layout(69, 3, 70)
    pin_norm()
    run = state_kernels(LINEAR_KINDS[options.kind], forest)
    for direction, widths in WIDTHS.items():
        for width in widths:
            for write_slots in (True, False) if direction == "forward" else (True,):
                run(direction, width, write_slots)
    layer = make_layer(options.kind)
    step(layer, tree_mixer(forest), forest.num_rows)()
    step(layer, expanded_mixer(cu_seqlens(forest.lengths)), int(forest.lengths.sum()))()
    torch.cuda.synchronize()
    print("warm", options.kind, flush=True)
