"""PPO on two processes equals the plain loop over both processes' trajectories, and goes on from a checkpoint.

Under DDP in float64, with a value head and with a value model; under FSDP2, ZeRO-2 and ZeRO-3 in float32, and with
LoRA. A resumed training, of AdamW with two groups of parameters, equals the uninterrupted one bit for bit.
"""

import functools
import pickle
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from support.launching import made_once, run_processes
from support.models import shallow_model
from support.oracle import float64_everywhere
from support.ppo_oracle import PPOLoop
from support.ppo_runs import DISTRIBUTED, FAMILY, HEAD, arguments, with_adapters
from support.trainer_runs import TIMED
from transformers import AutoModelForCausalLM

from harts_hf import TreePPOConfig

SCRIPT = Path(__file__).parent / "train_ppo.py"
BACKENDS = {"ddp": "MULTI_CPU", "fsdp2": "FSDP", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED"}
# train_ppo.py says what their names mean.
FOLLOWED = ("ddp", "ddp-model", "fsdp2", "zero2-lora", "zero3")
RESUMED = ("fsdp2-lora-resumed", "zero2-lora-resumed", "zero3-resumed")
WAYS = sorted((*FOLLOWED, *RESUMED))  # DeepSpeed last: a process that had it cannot have FSDP
pytestmark = pytest.mark.distributed


def tolerance(way):
    """Of what training moved parameters by: float64, and float32 on models of two layers."""
    return 1e-9 if way.startswith("ddp") else 1e-4


@pytest.fixture(scope="module")
def left():
    """A folder, and what both ranks left of each way; asserts that two ranks of the real backend ran."""
    folder = made_once("ppo", lambda folder: run_processes(SCRIPT, folder, *WAYS, timeout=900))
    found = {way: [pickle.loads((folder / f"{way}-{rank}.pickle").read_bytes()) for rank in (0, 1)] for way in WAYS}
    for way, ranks in found.items():
        expected = (2, BACKENDS[way.partition("-")[0]])
        assert all((one["world_size"], one["distributed_type"]) == expected for one in ranks)
    return folder, found


@functools.cache
def followed(folder, kind):
    """The plain loop over what both ranks had, and all parameters at the start; backends had the same.

    Args:
        folder: of all ways.
        kind: "head", "model" or "lora".
    """
    ranks = [pickle.loads((folder / f"ddp-{rank}.pickle").read_bytes()) for rank in (0, 1)]
    plain = shallow_model(FAMILY, dtype=torch.float64, seed=1)
    plain = with_adapters(plain) if kind == "lora" else plain
    critic = shallow_model(FAMILY, dtype=torch.float64, seed=5) if kind == "model" else None
    models = [plain] if critic is None else [plain, critic]
    start = [{name: value.detach().clone() for name, value in model.named_parameters()} for model in models]
    args = TreePPOConfig(**arguments(folder, **DISTRIBUTED))
    loop = PPOLoop(plain, HEAD, args, critic=critic)
    with float64_everywhere(plain):
        loop.train([list(pair) for pair in zip(*(one["generations"] for one in ranks), strict=True)], args.max_steps)
    return loop, models, start


def named_alike(names):
    """Of the policy's parameters under adapters, where the value head is within the base model."""
    return {name.removeprefix("base_model.model."): value for name, value in names.items()}


@pytest.mark.parametrize("way", FOLLOWED)
def test_equals_the_loop(way, left):
    """Parameters of the policy, its adapters, the value head and the value model; losses; what is saved."""
    folder, found = left
    ranks = found[way]
    kind = next((kind for kind in ("model", "lora") if kind in way), "head")
    loop, models, starts = followed(folder, kind)
    head = {"critic.weight": loop.weight, "critic.bias": loop.bias}
    begun = dict(zip(head, HEAD, strict=True))
    for model, start, got in zip(models, starts, (ranks[0]["parameters"], ranks[0]["values"]), strict=False):
        is_last = model is models[-1]
        expected = named_alike(dict(model.named_parameters())) | (head if is_last else {})
        got = named_alike(got)
        assert got.keys() == expected.keys()
        before = named_alike(start) | (begun if is_last else {})
        moved = max((expected[name].detach() - before[name]).abs().max().item() for name in expected)
        assert 1e-4 < moved < 1
        for name, value in expected.items():
            difference = (got[name].double() - value.detach()).abs().max().item()
            assert difference < tolerance(way) * moved, f"{name}: {difference:.2e} of {moved:.1e}"
    logs = [entry for entry in ranks[0]["logs"] if "loss" in entry]
    assert len(logs) == len(loop.logs) == DISTRIBUTED["max_steps"]
    for entry, expected in zip(logs, loop.logs, strict=True):
        for name, value in expected.items():
            assert abs(entry[name] - value) < 1e-4 * max(1.0, abs(value)), f"{name}: {entry[name]}, {value}"


@pytest.mark.parametrize("way", WAYS)
def test_what_is_saved(way, left):
    """The value head beside the policy, or in the value model's folder; the policy loads by itself."""
    folder, found = left
    saved, first = folder / way / "saved", found[way][0]
    stored = load_file((saved / "value_model" if "model" in way else saved) / "value_head.safetensors")
    own = named_alike(first["values"] or first["parameters"])
    assert stored.keys() == {"critic.weight", "critic.bias"}
    assert all(torch.equal(value, own[name]) for name, value in stored.items())
    if "lora" in way:
        policy = PeftModel.from_pretrained(shallow_model(FAMILY, seed=1), saved)
        adapters = {name: value for name, value in policy.named_parameters() if "lora" in name}
        assert adapters and all(torch.equal(value, own[name]) for name, value in named_alike(adapters).items())
    else:
        _, info = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
        assert not any(info.values())


@pytest.mark.parametrize("way", RESUMED)
def test_goes_on_as_if_nothing_had_been(way, left):
    """From a checkpoint in the middle of a generation batch, at an epoch's end: parameters and metrics."""
    for rank in left[1][way]:
        assert rank["parameters"].keys() == rank["resumed"]["parameters"].keys()
        for name, value in rank["parameters"].items():
            assert torch.equal(rank["resumed"]["parameters"][name], value), name
        last, again = ([log for log in logs if "loss" in log][-1] for logs in (rank["logs"], rank["resumed"]["logs"]))
        for name, value in last.items():
            if not name.endswith((*TIMED, "_seconds")):
                assert again[name] == value, name


def test_backends_agree_on_adapters(left):
    """After steps of AdamW, as far as float32 goes."""
    one, other = (left[1][way][0]["parameters"] for way in RESUMED[:2])
    adapters = {name: value for name, value in named_alike(one).items() if "lora" in name or "critic" in name}
    begun = named_alike(dict(with_adapters(shallow_model(FAMILY, seed=1)).named_parameters()))
    begun |= dict(zip(("critic.weight", "critic.bias"), (value.float() for value in HEAD), strict=True))
    assert len(adapters) > 4
    for name, value in adapters.items():
        moved = (value - begun[name]).abs().max().item()
        assert moved > 1e-3, name
        assert (named_alike(other)[name] - value).abs().max().item() < 1e-4 * moved, name
