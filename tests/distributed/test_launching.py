"""`harts train` behind real launchers: two processes where two are asked for, or a refusal."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = [
    "--branching", "2", "2", "1", "--num_generations", "4", "--per_device_train_batch_size", "8", "--max_steps", "2",
    "--logging_steps", "1", "--save_strategy", "no", "--num_processes", "2",
]  # fmt: skip
LAUNCH = """
compute_environment: LOCAL_MACHINE
distributed_type: {kind}
mixed_precision: 'no'
num_machines: 1
num_processes: 2
machine_rank: 0
use_cpu: {use_cpu}
"""
pytestmark = pytest.mark.distributed


def launch(command, folder):
    """The finished process of a launcher, in the folder of the project."""
    train = ["-m", "harts_hf.cli", "train", "recipes/tiny_grpo.yaml", *SMALL, "--output_dir", str(folder / "out")]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, "-m", *command, *train],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def accelerate(folder, kind):
    """The command of `accelerate launch` for two processes of a kind."""
    file = folder / "launch.yaml"
    file.write_text(LAUNCH.format(kind=kind, use_cpu=str(kind == "MULTI_CPU").lower()))
    return ["accelerate.commands.launch", "--config_file", str(file)]


@pytest.mark.parametrize("launcher", ["accelerate", pytest.param("torchrun", marks=pytest.mark.exhaustive)])
def test_two_processes_train(launcher, tmp_path):
    """One of them prints; the step is of both."""
    if launcher == "torchrun":
        command = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    else:
        command = accelerate(tmp_path, "MULTI_GPU")
    done = launch(command, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("step     2/2") == 1 and "for 2 steps on 2 processes," in done.stdout
    entries = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    # Two trees of four leaves on each process; of each leaf at least prompt, a call and an end.
    assert len(entries) == 2 and min(entry["tree/expanded_tokens"] for entry in entries) > 16 * 4


def test_a_launcher_that_starts_one(tmp_path):
    """Accelerate starts a single process for MULTI_CPU: refused, with what starts two."""
    done = launch(accelerate(tmp_path, "MULTI_CPU"), tmp_path)
    assert done.returncode != 0
    assert "expected 2 processes (num_processes), got 1: start them with `accelerate launch" in done.stderr
