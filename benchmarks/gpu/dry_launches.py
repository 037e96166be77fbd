"""Runs whole models on the CPU as a GPU would, but compiles each Triton kernel for Hopper instead of launching it.

    PYTHONPATH=../..:../../tests python dry_launches.py [--float32] FAMILY ...        needs FLA and Triton, no GPU

Results are meaningless (no kernel runs); what is shown is that all of them compile for the sizes, dtypes and head dims
that occur and fit the shared memory, and which of FLA's would be tuned on a machine with FLA_CONFIG_DIR and
FLA_CACHE_MODE set as they are now.
Attention is the CPU's; its block lists are compiled.
"""

import collections
import sys
import time
from types import SimpleNamespace

import torch
import triton
from support.hopper_launches import SHARED_MEMORY, compile_launches

# What FLA and the GPU path ask for when they are imported.
torch.cuda.get_device_capability = lambda *_: (9, 0)
torch.cuda.get_device_name = lambda *_: "NVIDIA H200"
torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=132, name="NVIDIA H200")
torch.cuda.device_count = lambda: 1


tuned: set[tuple] = set()


def first_config(self, *args, **kwargs):
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    key = AutotuneKey.build(self.arg_names, self.keys, args, kwargs).autotune_key
    config = self.cache.get(key)
    if config is None and len(self.configs) > 1:
        tuned.add((self.base_fn.__name__, key))
    config = config or self.prune_configs(kwargs)[0]
    return self.fn.run(*args, **{**kwargs, **config.all_kwargs()})


launched = compile_launches()
triton.runtime.driver.active.utils = SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": SHARED_MEMORY})
triton.runtime.autotuner.Autotuner.run = first_config

import fla.utils.hardware  # noqa: E402
from fla.ops.utils.cache import AutotuneKey  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402
from whole_models import CONFIGS, bush, draw_tokens  # noqa: E402

import harts_hf.kernels.attention.torch as attention  # noqa: E402
from harts_hf import PlannerConfig  # noqa: E402
from harts_hf.kernels.attention.flash import TILES  # noqa: E402
from harts_hf.kernels.attention.triton_blocks import build_lists  # noqa: E402
from harts_hf.kernels.conv import api as conv  # noqa: E402
from harts_hf.kernels.gather import api as gather  # noqa: E402
from harts_hf.kernels.linear_attention import api as linear  # noqa: E402
from harts_hf.verify import verify  # noqa: E402

SMALL = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 64, "moe_intermediate_size": 32}
fla.utils.hardware.get_all_max_shared_mem = lambda: {None: SHARED_MEMORY}  # by the index of a CPU device
run_attention = attention.tree_attention


def attention_with_lists(query, key, value, intervals, **options):
    for tile, by_key in zip(TILES.get((key.shape[3], value.shape[3]), TILES[128, 128]), (False, True), strict=True):
        build_lists(intervals, query.shape[2], tile, by_key=by_key)
    return run_attention(query, key, value, intervals, **options)


def main() -> None:
    for api, backend in ((conv, "triton"), (gather, "triton"), (linear, "fla")):
        api._BY_DEVICE["cpu"] = backend
    attention.tree_attention = attention_with_lists
    names = [name for name in sys.argv[1:] if name != "--float32"]
    dtype = torch.float32 if "--float32" in sys.argv else torch.bfloat16
    for family in names or CONFIGS:
        launched.clear()
        tuned.clear()
        begin = time.monotonic()
        config = AutoConfig.for_model(family, **{**CONFIGS[family], **SMALL})
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        trajectories = [row[:270] for row in draw_tokens(bush(6200), 128)[:5]]
        verify(model, [trajectories], planner=PlannerConfig(sharing="always"))
        kernels = collections.Counter(name for name, _ in set(launched))
        print(family, f"{time.monotonic() - begin:.0f} s; kernels:", dict(kernels), flush=True)
        print("  would be tuned:", *(f"\n    {name} {key}" for name, key in sorted(tuned)), flush=True)


if __name__ == "__main__":
    main()
