"""Supervised training on two processes equals stock TRL's on the same backend and batches.

Under DDP in float64; FSDP2 and ZeRO-3 in float32, where stock TRL's backends differ by 1.2e-7 after three steps that
move parameters by 3e-3 (see test_ranks.py).
"""

import pickle
from pathlib import Path

import pytest
import torch
from support.launching import made_once, run_processes
from support.models import shallow_model
from support.trainer_runs import TIMED

SCRIPT = Path(__file__).parent / "train_sft.py"
KINDS = {"ddp": "MULTI_CPU", "fsdp2": "FSDP", "zero3": "DEEPSPEED"}
# Of what training moved parameters by, and of metrics.
TOLERANCES = {"ddp": 1e-5, "fsdp2": 1e-4, "zero3": 1e-4}
pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def left():
    """What both ranks left of each backend and trainer; asserts that two ranks of the real backend ran."""
    folder = made_once("sft", lambda folder: run_processes(SCRIPT, folder, *KINDS, timeout=900))
    found = {
        (backend, name): [pickle.loads((folder / f"{backend}-{name}-{rank}").read_bytes()) for rank in (0, 1)]
        for backend in KINDS
        for name in ("tree", "stock")
    }
    for (backend, _), ranks in found.items():
        assert all((one["world_size"], one["distributed_type"]) == (2, KINDS[backend]) for one in ranks)
    return found


@pytest.mark.parametrize("backend", KINDS)
def test_equals_trl(backend, left):
    """Parameters and TRL's metrics; the tree shared."""
    tree, stock = (left[backend, name][0] for name in ("tree", "stock"))
    start = shallow_model("qwen3_5_text", dtype=torch.float64, seed=1).state_dict()
    moved = max((value.double() - start[name]).abs().max().item() for name, value in stock["parameters"].items())
    assert 1e-4 < moved < 1
    for name, value in stock["parameters"].items():
        difference = (tree["parameters"][name].double() - value.double()).abs().max().item()
        assert difference < TOLERANCES[backend] * moved, f"{name}: {difference:.2e}, training moved it by {moved:.1e}"
    for stock_log, tree_log in zip(stock["logs"], tree["logs"], strict=True):
        for name, value in stock_log.items():
            if not name.endswith(TIMED):
                allowed = TOLERANCES[backend] * max(1.0, abs(value))
                assert abs(tree_log[name] - value) <= allowed, f"{name}: {tree_log[name]} against {value}"
    assert tree["logs"][0]["tree/sharing_ratio"] > 1.2
