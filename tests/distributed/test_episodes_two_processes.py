"""Two processes with unequal numbers of rows train as the loop over samples does, which knows no processes.

Under DDP in float64; FSDP2 and ZeRO-3 in float32, where stock TRL's backends differ by 1.2e-7 after three such steps
that move parameters by 3e-3 (see test_two_processes.py).
"""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import recorded
from support.episode_runs import FAMILY, assert_same_logs, assert_same_parameters, follow
from support.models import tiny_model

from harts_hf import TreeGRPOConfig

SCRIPT = Path(__file__).parent / "train_episodes.py"
WRAPPERS = {
    "ddp": ("MULTI_CPU", "DistributedDataParallel"),
    "fsdp2": ("FSDP", "FSDPQwen3_5ForCausalLM"),
    "zero3": ("DEEPSPEED", "DeepSpeedEngine"),
}
CASES = ["grpo", "bnpo", "dapo", "vespo", "sequence-level", "weighed-grpo", "weighed-bnpo", "weighed-dapo"]
BROKEN = {
    "mixed-keys": ("all 2 processes or of none, got it from [0]", "all 2 processes or of none, got it from [0]"),
    "broken-index": ("got 99 in row", "error on process 0: ValueError: expected 'episode' to hold indices"),
    "broken-reward": ("error on process 1: ValueError: expected 'recorded_reward'", "one per episode"),
}
pytestmark = pytest.mark.distributed


def run(backend: str, folder: Path, cases: list[str]) -> dict[str, list[dict]]:
    """For each case what both ranks left; asserts that two ranks of the real backend ran."""
    tiny_model(FAMILY, dtype=torch.float64, seed=1).save_pretrained(folder / "start")
    support = str(SCRIPT.parents[1])
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [support, os.environ.get("PYTHONPATH")])),
    }
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(SCRIPT)]
    done = subprocess.run(
        [sys.executable, *command, backend, str(folder), *cases],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = {case: [pickle.loads((folder / f"{case}-{rank}").read_bytes()) for rank in (0, 1)] for case in cases}
    for ranks in found.values():
        for one in ranks:
            assert (one["world_size"], one["distributed_type"], one["wrapper"]) == (2, *WRAPPERS[backend])
    return found


def loop_of(ranks: list[dict], folder: Path):
    """The loop over samples on what both ranks drew, whose slices are unequal."""
    settings = ranks[0]["settings"]
    names = TreeGRPOConfig.__dataclass_fields__
    args = TreeGRPOConfig(**recorded.arguments(folder))
    for name, value in settings.items():
        if name in names:
            setattr(args, name, value)
    training, evaluation = (
        [list(pair) for pair in zip(*(one[kind] for one in ranks), strict=True)] for kind in ("training", "evaluation")
    )
    loop = follow(args, training, evaluation)
    assert any(len(one[0]) != len(one[1]) for window in loop.windows for one in window)
    return loop


@pytest.fixture(scope="module")
def under_ddp(tmp_path_factory):
    """All cases in one launch."""
    return run("ddp", tmp_path_factory.mktemp("ddp"), CASES + list(BROKEN))


@pytest.mark.parametrize("case", CASES)
def test_ddp(case, under_ddp, tmp_path):
    """Parameters, losses and metrics; both ranks log the same."""
    ranks = under_ddp[case]
    loop = loop_of(ranks, tmp_path)
    assert_same_parameters(ranks[0]["parameters"], loop)
    assert_same_logs(ranks[0]["logs"], loop)


@pytest.mark.parametrize("case", BROKEN)
def test_both_ranks_end(case, under_ddp):
    """What one rank's rollout function gets wrong is an error on both, before either waits for the other."""
    for one, message in zip(under_ddp[case], BROKEN[case], strict=True):
        assert one["error"] is not None and message in one["error"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["fsdp2", "zero3"])
def test_sharded(backend, tmp_path):
    """Parameters and losses."""
    ranks = run(backend, tmp_path, ["weighed-grpo"])["weighed-grpo"]
    loop = loop_of(ranks, tmp_path)
    assert_same_parameters({n: p.double() for n, p in ranks[0]["parameters"].items()}, loop, tolerance=1e-3)
    assert ranks[0]["logs"][0]["loss"] == pytest.approx(loop.logs[0]["loss"], abs=1e-5)
