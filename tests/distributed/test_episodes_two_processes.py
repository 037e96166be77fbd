"""Two processes with unequal numbers of rows train as the loop over samples does, which knows no processes.

Under DDP in float64; FSDP2 and ZeRO-3 in float32, where stock TRL's backends differ by 1.2e-7 after three such steps
that move parameters by 3e-3 (see test_ranks.py).
"""

import pickle
from pathlib import Path

import pytest
import torch
from support import recorded
from support.episode_runs import FAMILY, assert_same_logs, assert_same_parameters, follow
from support.launching import made_once, run_processes
from support.models import shallow_model

from harts_hf import TreeGRPOConfig

SCRIPT = Path(__file__).parent / "train_episodes.py"
WRAPPERS = {
    "ddp": ("MULTI_CPU", "DistributedDataParallel"),
    "fsdp2": ("FSDP", "FSDPQwen3_5ForCausalLM"),
    "zero3": ("DEEPSPEED", "DeepSpeedEngine"),
}
CASES = [f"ddp:{name}" for name in ("grpo", "bnpo", "dapo", "sequence-level", "weighed-bnpo", "weighed-dapo")]
SHARDED = ["fsdp2:weighed-grpo", "zero3:weighed-grpo"]
# From files, off-policy: groups on both ranks, unknown log-probs on one of them.
RECORDED = ["ddp:recorded-straddling", "fsdp2:recorded-unknown"]
BROKEN = {
    "ddp:mixed-keys": ("all 2 processes or of none, got it from [0]", "all 2 processes or of none, got it from [0]"),
    "ddp:broken-index": ("got 99 in row", "error on process 0: ValueError: expected 'episode' to hold indices"),
    "ddp:broken-reward": ("error on process 1: ValueError: expected 'recorded_reward'", "one per episode"),
}
# Of what training moved parameters by, and of metrics: see the module.
SHARDED_TOLERANCE = 1e-4
pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def left():
    """For each case what both ranks left, of one launch; asserts that two ranks of the real backend ran."""
    ddp, fsdp2 = RECORDED
    names = [*CASES, ddp, "ddp:clipped", *BROKEN, fsdp2, *SHARDED]

    def make(folder):
        shallow_model(FAMILY, dtype=torch.float64, seed=1).save_pretrained(folder / "start")
        run_processes(SCRIPT, folder, *names, timeout=900)

    folder = made_once("episodes", make)
    found = {name: [pickle.loads((folder / f"{name}-{rank}").read_bytes()) for rank in (0, 1)] for name in names}
    for name, ranks in found.items():
        for one in ranks:
            expected = (2, *WRAPPERS[name.partition(":")[0]])
            assert (one["world_size"], one["distributed_type"], one["wrapper"]) == expected
    return found


def loop_of(ranks: list[dict], folder: Path, *, off_policy: bool = False):
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
    loop = follow(args, training, evaluation, off_policy=off_policy)
    assert any(len(one[0]) != len(one[1]) for window in loop.windows for one in window)
    return loop


@pytest.mark.parametrize("case", CASES)
def test_ddp(case, left, tmp_path):
    """Parameters, losses and metrics."""
    ranks = left[case]
    loop = loop_of(ranks, tmp_path)
    assert_same_parameters(ranks[0]["parameters"], loop)
    assert_same_logs(ranks[0]["logs"], loop)


def test_recorded_straddling(left, tmp_path):
    """A group that lies on both ranks is handed out once."""
    ranks = left["ddp:recorded-straddling"]
    loop = loop_of(ranks, tmp_path, off_policy=True)
    assert_same_parameters(ranks[0]["parameters"], loop)
    assert_same_logs(ranks[0]["logs"], loop)


def test_recorded_unknown(left, tmp_path):
    """All ranks score the policy where one has to: under FSDP2 it could not alone."""
    ranks = left["fsdp2:recorded-unknown"]
    loop = loop_of(ranks, tmp_path, off_policy=True)
    assert_same_parameters(ranks[0]["parameters"], loop, tolerance=SHARDED_TOLERANCE)
    assert_same_logs(ranks[0]["logs"], loop, tolerance=SHARDED_TOLERANCE)


def test_least_of_all_rows(left):
    """The least clipped row of all ranks is one of theirs: nothing fills up the rank with fewer rows."""
    for one in left["ddp:clipped"]:
        assert one["logs"][1]["clip_ratio/low_min"] > 0


@pytest.mark.parametrize("case", SHARDED)
def test_sharded(case, left, tmp_path):
    """Parameters and losses."""
    ranks = left[case]
    loop = loop_of(ranks, tmp_path)
    parameters = {name: value.double() for name, value in ranks[0]["parameters"].items()}
    assert_same_parameters(parameters, loop, tolerance=SHARDED_TOLERANCE)
    assert_same_logs(ranks[0]["logs"], loop, tolerance=SHARDED_TOLERANCE)


@pytest.mark.parametrize("case", BROKEN)
def test_both_ranks_end(case, left):
    """What one rank's rollout function gets wrong is an error on both, before either waits for the other."""
    for one, message in zip(left[case], BROKEN[case], strict=True):
        assert one["error"] is not None and message in one["error"]
