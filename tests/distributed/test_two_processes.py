"""Two processes over gloo: TreeGRPOTrainer against stock GRPOTrainer on the same backend, in float32.

Budget: after three SGD steps the backends of stock TRL differ from one another by 1.2e-7 (sums in another order); the
training moves parameters by 3e-3.
"""

import json
from pathlib import Path

import pytest
import torch
from support.launching import run_processes
from support.models import tiny_model

SCRIPT = Path(__file__).parent / "train_two.py"
WRAPPERS = {
    "ddp": ("MULTI_CPU", "DistributedDataParallel"),
    "fsdp2": ("FSDP", "FSDPQwen3_5ForCausalLM"),
    "fsdp2_whole": ("FSDP", "FSDPQwen3_5ForCausalLM"),
    "zero3": ("DEEPSPEED", "DeepSpeedEngine"),
}
pytestmark = pytest.mark.distributed


def train(kind: str, backend: str, folder: Path) -> tuple[dict[str, torch.Tensor], list[dict]]:
    """Rank 0's whole parameters and both ranks' facts; asserts that two ranks of the real backend ran."""
    run_processes(SCRIPT, kind, backend, folder)
    facts = [json.loads((folder / f"{kind}-{backend}-{rank}.json").read_text()) for rank in (0, 1)]
    for fact in facts:
        assert (fact["world_size"], fact["distributed_type"], fact["wrapper"]) == (2, *WRAPPERS[backend])
    return torch.load(folder / f"{kind}-{backend}.pt"), facts


def largest_difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """Over all parameters."""
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


@pytest.mark.parametrize("backend", WRAPPERS)
def test_backend(backend, tmp_path):
    """Parameters and metrics equal stock TRL's although the ranks have unequal numbers of microbatches."""
    stock, stock_facts = train("stock", backend, tmp_path)
    tree, facts = train("tree", backend, tmp_path)
    start = dict(tiny_model("qwen3_5_text", seed=1).named_parameters())
    assert largest_difference(stock, start) > 1e-3
    assert largest_difference(stock, tree) < 1e-6
    counts = [fact["microbatches"] for fact in facts]
    assert counts[0] != counts[1] and min(counts[0]) > 1
    for fact in facts:  # metrics count the world
        logged = [log["tree/microbatches"] for log in fact["logs"][:-1]]
        assert logged == [sum(pair) for pair in zip(*counts, strict=True)]
    for stock_log, log in zip(stock_facts[0]["logs"][:-1], facts[0]["logs"][:-1], strict=True):
        for name in {"loss", "entropy", "reward", "clip_ratio/region_mean"} & stock_log.keys():
            assert log[name] == pytest.approx(stock_log[name], abs=1e-5)
        assert log["tree/sharing_ratio"] > 1.3


def test_every_parameter_is_touched_by_the_last_backward(tmp_path):
    """Planted: a trunk without labels whose backward touches no parameter; DDP's gradients are then wrong."""
    stock, _ = train("stock", "ddp", tmp_path)
    try:
        untouched, _ = train("untouched", "ddp", tmp_path)
    except AssertionError as error:
        assert "Expected to have finished reduction" in str(error)
    else:
        assert largest_difference(stock, untouched) > 1e-5
