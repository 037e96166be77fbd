"""Times the launch configurations of the two state kernels.

    python tune_states.py OUT.json

Prints the best and the ten next of each kind: gate per head or channel, 32 or 16 heads, one long chain or many short.
Worker processes compile first, in parallel, into Triton's cache on disk.
"""

import itertools
import json
import multiprocessing
import sys

import numpy as np
import torch
from measure import median_ms
from trees import Forest, join

from harts_hf.kernels.linear_attention.fla_tables import PackedChains, build_packed_chains
from harts_hf.kernels.linear_attention.triton_states import LaunchConfig, run_states_backward, run_states_forward
from harts_hf.tree import RolloutTree

# Eight warps are left out: with one stage the backward read out of bounds (Triton 3.7.1).
CONFIGS = [LaunchConfig(*c) for c in itertools.product((16, 32, 64), (4,), (2, 3, 4))]
KINDS = [(heads, value_heads, kimi) for heads, value_heads, kimi in ((16, 32, False), (32, 32, True), (16, 16, True))]
WORKERS = 9


def chains_of(forest: Forest) -> PackedChains:
    return build_packed_chains(forest.linear_tables().to("cuda"), np.zeros(0, np.int64), 0)


def inputs(chains: PackedChains, heads: int, value_heads: int, kimi: bool, dim: int = 128) -> dict:
    places = chains.num_places
    shape = {"q": heads, "k": heads, "w": value_heads, "u": value_heads, "do": value_heads, "dv": value_heads}
    tensors = {name: torch.randn(1, places, n, dim, device="cuda").bfloat16() * 0.1 for name, n in shape.items()}
    gate = torch.rand(1, places, value_heads, *([dim] if kimi else []), device="cuda") * -3
    slots = torch.zeros(chains.num_slots, value_heads, dim, dim, device="cuda")
    return {**tensors, "g": gate, "slots": slots}


def runners(chains: PackedChains, x: dict, config: LaunchConfig) -> dict:
    def forward() -> None:
        run_states_forward(x["k"], x["w"], x["u"], x["g"], x["slots"], chains, write_slots=True, config=config)

    def backward() -> None:
        d_slots = torch.zeros_like(x["slots"])
        run_states_backward(
            x["q"], x["k"], x["w"], x["g"], x["do"], x["dv"], d_slots, chains, scale=0.1, config=config
        )

    return {"forward": forward, "backward": backward}


def compile_part(part: int) -> None:
    small = chains_of(join([RolloutTree.from_shape([-1], [128], [0])]))
    jobs = list(itertools.product(KINDS, CONFIGS))[part::WORKERS]
    for kind, config in jobs:
        for run in runners(small, inputs(small, *kind), config).values():
            try:
                run()
            except Exception:
                torch.cuda.synchronize()


def main() -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=compile_part, args=(part,)) for part in range(WORKERS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    found = []
    trees = {
        "long": join([RolloutTree.from_shape([-1], [32768], [0])]),
        "short": join([RolloutTree.from_shape([-1] + [0] * 128, [64] + [256] * 128, list(range(1, 129)))]),
    }
    for (heads, value_heads, kimi), (name, forest) in itertools.product(KINDS, trees.items()):
        chains = chains_of(forest)
        x = inputs(chains, heads, value_heads, kimi)
        for direction in ("forward", "backward"):
            times = []
            for config in CONFIGS:
                try:
                    times.append((median_ms(runners(chains, x, config)[direction], 5, 1), config))
                except Exception as error:
                    print("failed", config, type(error).__name__, flush=True)
            times.sort(key=lambda entry: entry[0])
            label = f"{'kda' if kimi else 'gdn'}-{value_heads} {name} {direction}"
            print(label, [(round(t, 3), c.block_v, c.num_warps, c.num_stages) for t, c in times[:7]], flush=True)
            found.append({"case": label, "times": [(t, c.block_v, c.num_warps, c.num_stages) for t, c in times]})
    with open(sys.argv[1], "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
