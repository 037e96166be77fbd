"""Processes that share one forest train as stock TRL does, whoever computes what.

Float32. Budget: after three SGD steps the backends of stock TRL differ from one another by 1.2e-7 in ``qwen3_5_text``,
and by 2.1e-7 in ``bailing_hybrid`` (sums in another order); the training moves parameters by 3e-3. Two steps are run.
So all backends are compared with stock TRL under one of them.
"""

import fcntl
import os
import pickle
from pathlib import Path

import pytest
import torch
from support.launching import FOLDER, run_processes
from support.models import shallow_model, tiny_model

SCRIPT = Path(__file__).parent / "train_ranks.py"
WRAPPERS = {
    "ddp": ("MULTI_CPU", "DistributedDataParallel"),
    "fsdp2": ("FSDP", "FSDP"),
    "fsdp2_whole": ("FSDP", "FSDP"),
    "zero1": ("DEEPSPEED", "DeepSpeedEngine"),
    "zero2": ("DEEPSPEED", "DeepSpeedEngine"),
    "zero3": ("DEEPSPEED", "DeepSpeedEngine"),
}
# Each rank its own rows, scored; some trunks score nothing.
LONG = "ddp:qwen3_5_text:local:replay:long"
# Stock TRL is trained under DDP, whatever the backend that is compared with it: see `stock_of`.
DDP = [
    "ddp:qwen3_5_moe_text:random:replay:lora",
    "ddp:bailing_hybrid:random:nested:checkpointing",
    "ddp:qwen3_5_text:global:idle",
    "ddp:qwen3_5_text:random:nested:uneven:unused",
    "ddp:qwen3_5_text:local:nested:uneven:unused",
    "ddp:qwen3_5_text:global:whole:scored:entropy:evaluated",
    "ddp:bailing_hybrid:global:nested:checkpointing:unarmed",
    LONG,
]
FSDP = [
    "fsdp2:qwen3_5_moe_text:random:nested:checkpointing",
    "fsdp2:qwen3_5_moe_text:random:replay:checkpointing",
    "fsdp2:qwen3_5_text:local:replay:long",
    # Parameters are whole after forwards, and old log-probs scored first: so they are when a window begins.
    "fsdp2_whole:qwen3_5_text:random:nested:twice",
    "fsdp2_whole:qwen3_5_text:local:replay:long:twice",
]
# The router's auxiliary loss of each rank's own rows, whoever computes them.
ROUTER = [
    "ddp:qwen3_5_moe_text:global:replay:router",
    "ddp:qwen3_5_moe_text:local:replay:router",
    "fsdp2:qwen3_5_moe_text:global:replay:router:checkpointing",
]
# The bias of experts, moved by the load of all ranks; the load is counted whoever computes a token.
BIAS = ["ddp:bailing_hybrid:global:replay:bias", "ddp:bailing_hybrid:local:nested:bias"]
# Routes of the engine, of each rank's own rows, whoever computes them.
ROUTES = ["ddp:qwen3_5_moe_text:local:replay:routes", "ddp:qwen3_5_moe_text:global:replay:routes"]
ZERO = ["zero1:qwen3_5_text:random:nested", "zero2:qwen3_5_text:random:nested"]
ZERO3 = [
    "zero3:qwen3_5_text:random:nested:checkpointing",
    "zero3:qwen3_5_text:random:replay:checkpointing",
    "zero3:qwen3_5_text:local:replay:long",
    "zero3:qwen3_5_text:global:nested:checkpointing:unflagged",
    # Experts one by one, where DeepSpeed gathers layer by layer.
    "zero3:qwen3_5_moe_text:global:replay:router:checkpointing",
]
# Three processes.
THREE = ["ddp:qwen3_5_text:random:nested", "ddp:qwen3_5_text:global:replay"]
# Options that change nothing about stock TRL's numbers, or are not for it.
NOT_OF_STOCK = ("replay", "nested", "whole", "checkpointing", "unused")
PLANTED = ("unarmed", "unflagged")
TOLERANCE = 1e-6
pytestmark = pytest.mark.distributed


def read(folder: Path, count: int, case: str) -> list[dict]:
    """What each rank has after a case."""
    return [pickle.loads((folder / f"{case}-{rank}").read_bytes()) for rank in range(count)]


def launch(folder: Path, count: int, cases: list[str]) -> dict[str, list[dict]]:
    """What each rank has after each case; asserts that so many ranks of the real backend ran."""
    run_processes(SCRIPT, folder, *cases, count=count, timeout=900)
    found = {case: read(folder, count, case) for case in cases}
    for case, ranks in found.items():
        kind, wrapper = WRAPPERS[case.partition(":")[0]]
        for one in ranks:
            assert (one["world_size"], one["distributed_type"]) == (count, kind) and wrapper in one["wrapper"]
    return found


def stock_case(case: str) -> str:
    """The case of stock TRL that a case is compared with."""
    _, family, _, *options = case.split(":")
    return ":".join(["ddp", family, "stock", *(one for one in options if one not in NOT_OF_STOCK)])


def stock_of(cases: list[str], count: int) -> dict[str, list[dict]]:
    """What each rank of stock TRL has, by case; kept for all workers of pytest."""
    folder = Path(os.environ[FOLDER]) / f"stock-{count}"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if missing := [case for case in dict.fromkeys(cases) if not (folder / f"{case}-0").exists()]:
            launch(folder, count, missing)
    return {case: read(folder, count, case) for case in cases}


def check(stock: list[dict], ours: list[dict], case: str) -> None:
    """Parameters and metrics equal stock TRL's; every parameter moved; ranks that have all of them have the same."""
    backend, family, kind, *options = case.split(":")
    start = dict((tiny_model if "bias" in options else shallow_model)(family, seed=1).named_parameters())
    for name, expected in stock[0]["parameters"].items():
        difference = (ours[0]["parameters"][name] - expected).abs().max().item()
        assert difference < TOLERANCE, f"{name}: {difference:.1e}"
        if name in start:
            assert not torch.equal(expected, start[name]), f"{name} did not move"
        for other in ours[1:]:
            if other["parameters"] and backend != "zero3":
                assert torch.equal(other["parameters"][name], ours[0]["parameters"][name]), f"{name} differs by rank"
    if "bias" in options:
        check_bias(stock[0], ours[0])
    for stock_log, log in zip(stock[0]["logs"][:-1], ours[0]["logs"][:-1], strict=True):
        for name in {
            "loss",
            "entropy",
            "reward",
            "aux_loss",
            "clip_ratio/region_mean",
            "clip_ratio/low_min",
        } & stock_log.keys():
            assert log[name] == pytest.approx(stock_log[name], abs=1e-5), name
        if "eval_loss" in log:
            assert log["eval_loss"] == pytest.approx(stock_log["eval_loss"], abs=1e-5)
            assert log["eval_num_tokens"] == stock_log["eval_num_tokens"]
            continue
        assert log["tree/global_placement"] == (kind != "local")
        if "idle" not in options:  # a step may have a single microbatch then
            # With two iterations, the first step of a generation finds what TRL has scored.
            is_skipped = log["tree/scoring_kept"] if "twice" in options else "nested" in options
            assert log["tree/scoring_skipped"] == is_skipped
        if "long" in options:
            assert log["tree/sharing_ratio"] > 1.3
        if kind != "local":
            assert log["tree/exchanged_bytes"] > 4 * log["tree/expanded_tokens"]
            repeated = log["tree/repeated_tokens"] + log["tree/unique_tokens"]
            assert log["tree/unique_tokens"] <= repeated <= log["tree/backward_tokens"]
    if "long" in options:
        counts = [one["microbatches"] for one in ours]
        assert counts[0] != counts[1] and min(counts[0]) > 1
        logged = [log["tree/microbatches"] for log in ours[0]["logs"][:-1]]
        assert logged == [sum(ranks) for ranks in zip(*counts, strict=True)]
    for other in ours[1:]:  # metrics count the world, and are the same everywhere
        for log, same in zip(ours[0]["logs"][:-1], other["logs"][:-1], strict=True):
            names = [name for name in log if name.startswith("tree/")]
            assert (names or "eval_loss" in log) and [log[name] for name in names] == [same[name] for name in names]


def check_bias(stock: dict, ours: dict) -> None:
    """Loads are equal integers, biases after four steps equal bit for bit, and others than before."""
    assert torch.equal(stock["loads"].double(), ours["loads"].double())
    names = [name for name in stock["parameters"] if name.endswith("e_score_correction_bias")]
    assert len(names) == 2
    for name in names:
        assert torch.equal(stock["parameters"][name], ours["parameters"][name])
        assert stock["parameters"][name].unique().numel() > 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where processes leave what they have."""
    return tmp_path_factory.mktemp("ranks")


@pytest.mark.parametrize(
    ("count", "cases"),
    [
        pytest.param(2, DDP, id="ddp"),
        pytest.param(2, FSDP, id="fsdp2"),
        pytest.param(2, ROUTER, id="router"),
        pytest.param(2, BIAS, id="bias", marks=pytest.mark.slow),
        pytest.param(2, ZERO, id="zero", marks=pytest.mark.slow),
        pytest.param(2, ZERO3, id="zero3", marks=pytest.mark.slow),
        pytest.param(3, THREE, id="three", marks=pytest.mark.slow),
    ],
)
def test_one_forest(count, cases, folder):
    """Every backend, random placements, checkpointing, adapters, idle and uneven ranks."""
    found = launch(folder, count, cases)
    without = {
        case: next((case.removesuffix(f":{bug}") for bug in PLANTED if case.endswith(bug)), case) for case in cases
    }
    stock = stock_of([stock_case(one) for one in without.values()], count)
    for case, one in without.items():
        if one == case:
            check(stock[stock_case(case)], found[case], case)
        else:
            with pytest.raises(AssertionError, match=r"\d\.\de-0[1-5]|differs by rank"):
                check(stock[stock_case(one)], found[case], one)


def test_every_parameter_is_touched_by_the_last_backward(folder):
    """Planted: a trunk without labels whose backward touches no parameter; DDP's gradients are then wrong."""
    case = "ddp:qwen3_5_text:local:replay:long:untouched"
    with pytest.raises(AssertionError, match=r"Expected to have finished reduction|: \d\.\de-0[1-5]"):
        check(stock_of([stock_case(LONG)], 2)[stock_case(LONG)], launch(folder, 2, [case])[case], LONG)


@pytest.mark.slow
def test_routes_of_all_ranks(folder):
    """A shared forest trains on the routes that each rank's rows came with, as ranks by themselves do."""
    alone, together = launch(folder, 2, ROUTES).values()
    for name, expected in alone[0]["parameters"].items():
        assert (together[0]["parameters"][name] - expected).abs().max() < TOLERANCE, name
    for log, same in zip(alone[0]["logs"][:-1], together[0]["logs"][:-1], strict=True):
        assert 0.6 < log["tree/engine_routing_flips"] < 0.9
        for name in ("engine_routing_flips", "engine_routes_missing", "engine_routes_differing"):
            assert log[f"tree/{name}"] == pytest.approx(same[f"tree/{name}"], rel=1e-2), name
