"""Runs whole models on the CPU as a GPU would, but compiles each Triton kernel for Hopper instead of launching it.

Results are meaningless (no kernel runs); what is shown is that all of them compile for the sizes, dtypes and head dims
that occur and fit the shared memory, and which of FLA's would be tuned on a machine with FLA_CONFIG_DIR and
FLA_CACHE_MODE set as they are now. Attention is the CPU's; its block lists are compiled. Needs FLA and Triton, no GPU.
"""

import argparse
import collections
import time
from typing import Any

import torch

from benchmarks.gpu import hopper
from benchmarks.gpu.registry import NARROW


def take_gpu_path() -> None:
    """The package's kernels as on a GPU, for tensors on the CPU; attention compiles block lists alone."""
    import harts_hf.kernels.attention.torch as attention
    from harts_hf.kernels.attention.flash import TILES
    from harts_hf.kernels.attention.triton_blocks import build_lists
    from harts_hf.kernels.conv import api as conv
    from harts_hf.kernels.gather import api as gather
    from harts_hf.kernels.linear_attention import api as linear

    run = attention.tree_attention

    def attention_with_lists(query: Any, key: Any, value: Any, intervals: Any, **options: Any) -> Any:
        tiles = TILES.get((key.shape[3], value.shape[3]), TILES[128, 128])
        for tile, by_key in zip(tiles, (False, True), strict=True):
            build_lists(intervals, query.shape[2], tile, by_key=by_key)
        return run(query, key, value, intervals, **options)

    for api, backend in ((conv, "triton"), (gather, "triton"), (linear, "fla")):
        api._BY_DEVICE["cpu"] = backend
    attention.tree_attention = attention_with_lists


def main(options: argparse.Namespace) -> None:
    """`verify` of narrow models, family by family."""
    compiled: set[tuple] = set()
    tuned: set[tuple] = set()
    hopper.pretend()
    hopper.compile_launches(lambda *kernel: compiled.add(kernel), lambda *kernel: tuned.add(kernel))
    import fla.utils.hardware
    from transformers import AutoModelForCausalLM

    from benchmarks.gpu.trees import bush, draw_tokens
    from benchmarks.gpu.whole.models import configuration
    from harts_hf import PlannerConfig
    from harts_hf.verify import verify

    fla.utils.hardware.get_all_max_shared_mem = lambda: {None: hopper.SHARED_MEMORY}  # by the index of a CPU device
    take_gpu_path()
    for family in options.families:
        compiled.clear()
        tuned.clear()
        begin = time.monotonic()
        config = configuration(family, NARROW)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype)).eval()
        trajectories = [row[:270] for row in draw_tokens(bush(6200), NARROW["vocab_size"])[:5]]
        verify(model, [trajectories], planner=PlannerConfig(sharing="always"))
        kernels = collections.Counter(name for name, _ in compiled)
        print(family, f"{time.monotonic() - begin:.0f} s; kernels:", dict(kernels), flush=True)
        print("  would be tuned:", *(f"\n    {name} {key}" for name, key in sorted(tuned)), flush=True)
