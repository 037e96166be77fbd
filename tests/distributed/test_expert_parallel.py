"""Expert parallelism of Transformers: each process has some experts, and sends them tokens of all.

Budget: as in test_ranks.py; stock TRL with spread experts differs from stock TRL under DDP by 6e-8 after three
SGD steps that move parameters by 3e-3.
"""

import functools
from pathlib import Path

import pytest
import torch
from support.launching import made_once, run_processes

from harts_hf.planner.execution import DUMMY

SCRIPT = Path(__file__).parent / "train_experts.py"
pytestmark = pytest.mark.distributed


@functools.cache
def left_of(count):
    """What so many processes left."""
    folder = made_once(f"experts-{count}", lambda folder: run_processes(SCRIPT, folder, count=count))
    return [torch.load(folder / f"experts-{rank}.pt", weights_only=True) for rank in range(count)]


@pytest.mark.parametrize(
    ("count", "way"),
    [(2, "tree-experts"), (2, "tree-kept-graphs"), pytest.param(4, "tree-kept-graphs", marks=pytest.mark.slow)],
)
def test_spread_experts_train_as_whole_ones(count, way):
    """Experts get compact rows of a tree from all processes; parameters are those of stock TRL under DDP.

    Activation checkpointing is on, with a plan of each process's own. These open and close graphs at other places, so
    a dummy is open above a microbatch that its process is done with: gradients have to go back to where rows came
    from. Then it is off, with one plan for all, in which few dummies are left. With four processes, tokens go around
    in two pairs.
    """
    left = left_of(count)
    for rank in left:
        stock, tree = rank["stock-ddp"], rank[way]
        assert (stock["world_size"], stock["wrapper"]) == (len(left), "DistributedDataParallel")
        assert (tree["world_size"], tree["wrapper"]) == (len(left), "FSDPQwen3_5MoeForCausalLM")
        assert len(left) * tree["local_experts"] == stock["local_experts"]
        assert tree["parameters"].keys() == stock["parameters"].keys()
        for name, expected in stock["parameters"].items():
            assert (tree["parameters"][name] - expected).abs().max() < 1e-6, name
        for stock_log, log in zip(stock["logs"][:-1], tree["logs"][:-1], strict=True):
            assert log["entropy"] == pytest.approx(stock_log["entropy"], abs=1e-5)
            assert log["grad_norm"] == pytest.approx(stock_log["grad_norm"], rel=1e-5)
            assert log["tree/sharing_ratio"] > 1.2
    kinds = {kind for rank in left for kind, index in rank[way]["ops"] if index == DUMMY}
    assert "B" in kinds if way == "tree-experts" else kinds, kinds


def test_joined_convolutions_are_still_loaded_wrongly_in_parts():
    """Why such families are refused; if this fails, Transformers is mended, and `Family.joins_convolutions` can go."""
    names = left_of(2)[0]["misplaced"]
    assert names and all(name.endswith("conv1d.weight") for name in names)
