"""Times the widths of the two state kernels.

    python tune_states.py OUT.json

Gate per head or channel, 32 or 16 heads, one long chain or many short ones.
"""

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import torch
from measure import median_ms
from trees import Forest, join

from harts_hf.kernels.linear_attention.fla_tables import ChainGroup, build_packed_chains
from harts_hf.kernels.linear_attention.triton_states import run_states_backward, run_states_forward
from harts_hf.planner.chunks import CHUNK_SIZE
from harts_hf.tree import RolloutTree

WIDTHS = (16, 32, 64)
KINDS = [(heads, value_heads, kimi) for heads, value_heads, kimi in ((16, 32, False), (32, 32, True), (16, 16, True))]


def chains_of(forest: Forest) -> ChainGroup:
    """All chains as one group."""
    tables = forest.linear_tables().to("cuda")
    return build_packed_chains(tables, np.zeros(0, np.int64), 0, group_size=10**9).groups[0]


def inputs(chains: ChainGroup, heads: int, value_heads: int, kimi: bool, dim: int = 128) -> dict:
    places = chains.places[1]
    shape = {"q": heads, "k": heads, "w": value_heads, "u": value_heads, "do": value_heads, "dv": value_heads}
    tensors = {name: torch.randn(1, places, n, dim, device="cuda").bfloat16() * 0.1 for name, n in shape.items()}
    gate = torch.rand(1, places, value_heads, *([dim] if kimi else []), device="cuda") * -3
    slots = torch.zeros(chains.num_slots, value_heads, dim, dim, device="cuda")
    return {**tensors, "g": gate, "slots": slots}


def runners(chains: ChainGroup, x: dict, width: int) -> dict:
    def forward() -> None:
        run_states_forward(
            x["k"], x["w"], x["u"], x["g"], x["slots"], chains, chunk_size=CHUNK_SIZE, write_slots=True, block_v=width
        )

    def backward() -> None:
        d_slots = torch.zeros_like(x["slots"])
        run_states_backward(
            x["q"], x["k"], x["w"], x["g"], x["do"], x["dv"], d_slots, chains,
            chunk_size=CHUNK_SIZE, scale=0.1, block_v=width,
        )  # fmt: skip

    return {"forward": forward, "backward": backward}


def main() -> None:
    found = []
    trees = {
        "long": join([RolloutTree.from_shape([-1], [32768], [0])]),
        "short": join([RolloutTree.from_shape([-1] + [0] * 128, [64] + [256] * 128, list(range(1, 129)))]),
    }
    for (heads, value_heads, kimi), (name, forest) in itertools.product(KINDS, trees.items()):
        chains = chains_of(forest)
        x = inputs(chains, heads, value_heads, kimi)
        for direction in ("forward", "backward"):
            times = {
                width: median_ms(runners(chains, x, width)[direction], 5, 1)
                for width in (WIDTHS if direction == "forward" else WIDTHS[:2])
            }
            label = f"{'kda' if kimi else 'gdn'}-{value_heads} {name} {direction}"
            print(label, {width: round(time, 3) for width, time in times.items()}, flush=True)
            found.append({"case": label, "times": times})
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
