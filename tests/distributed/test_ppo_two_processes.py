"""PPO on two processes equals the plain loop over both processes' trajectories.

Under DDP in float64, with a value head and with a value model; under FSDP2 and ZeRO-3 in float32.
"""

import functools
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.launching import run_processes
from support.models import tiny_model
from support.oracle import float64_everywhere
from support.ppo_oracle import PPOLoop
from support.ppo_runs import DISTRIBUTED, FAMILY, HEAD, arguments
from transformers import AutoModelForCausalLM

from harts_hf import TreePPOConfig

SCRIPT = Path(__file__).parent / "train_ppo.py"
KINDS = {"ddp": "MULTI_CPU", "ddp_model": "MULTI_CPU", "fsdp2": "FSDP", "zero3": "DEEPSPEED"}
# Of what training moved parameters by: float64, and float32 on models of three layers.
TOLERANCES = {"ddp": 1e-9, "ddp_model": 1e-9, "fsdp2": 1e-4, "zero3": 1e-4}
pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """What both ranks left of each; asserts that two ranks of the real backend ran."""
    folder = tmp_path_factory.mktemp("ppo")
    run_processes(SCRIPT, folder, *KINDS, timeout=900)
    found = {kind: [pickle.loads((folder / f"{kind}-{rank}").read_bytes()) for rank in (0, 1)] for kind in KINDS}
    for kind, ranks in found.items():
        assert all((one["world_size"], one["distributed_type"]) == (2, KINDS[kind]) for one in ranks)
    return folder, found


@functools.cache
def followed(folder, *, with_model):
    """The plain loop over what both ranks had, and all parameters at the start; backends had the same."""
    ranks = [pickle.loads((folder / f"ddp-{rank}").read_bytes()) for rank in (0, 1)]
    plain = tiny_model(FAMILY, dtype=torch.float64, seed=1)
    critic = tiny_model(FAMILY, dtype=torch.float64, seed=5) if with_model else None
    models = [plain] if critic is None else [plain, critic]
    start = [{name: value.detach().clone() for name, value in model.named_parameters()} for model in models]
    args = TreePPOConfig(**arguments(folder, **DISTRIBUTED))
    loop = PPOLoop(plain, HEAD, args, critic=critic)
    with float64_everywhere(plain):
        loop.train([list(pair) for pair in zip(*(one["generations"] for one in ranks), strict=True)], args.max_steps)
    return loop, models, start


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_loop(kind, left):
    """Parameters of the policy, of the value head and of the value model; losses; what is saved."""
    folder, found = left
    ranks = found[kind]
    loop, models, starts = followed(folder, with_model=kind.endswith("_model"))
    head = {"critic.weight": loop.weight, "critic.bias": loop.bias}
    begun = dict(zip(head, HEAD, strict=True))
    for model, start, got in zip(models, starts, (ranks[0]["parameters"], ranks[0]["values"]), strict=False):
        is_last = model is models[-1]
        expected = dict(model.named_parameters()) | (head if is_last else {})
        assert got.keys() == expected.keys()
        before = start | (begun if is_last else {})
        moved = max((expected[name].detach() - before[name]).abs().max().item() for name in expected)
        assert 1e-4 < moved < 1
        for name, value in expected.items():
            difference = (got[name].double() - value.detach()).abs().max().item()
            assert difference < TOLERANCES[kind] * moved, f"{name}: {difference:.2e} of {moved:.1e}"
    logs = [entry for entry in ranks[0]["logs"] if "loss" in entry]
    assert len(logs) == len(loop.logs) == DISTRIBUTED["max_steps"]
    for entry, expected in zip(logs, loop.logs, strict=True):
        for name, value in expected.items():
            assert abs(entry[name] - value) < 1e-4 * max(1.0, abs(value)), f"{name}: {entry[name]}, {value}"
    saved = folder / kind / "saved"
    stored = load_file((saved / "value_model" if kind.endswith("_model") else saved) / "value_head.safetensors")
    own = ranks[0]["values"] or ranks[0]["parameters"]
    assert all(torch.equal(value, own[name]) for name, value in stored.items())
    _, info = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert not any(info.values())
