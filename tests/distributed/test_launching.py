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
distributed_type: MULTI_GPU
mixed_precision: 'no'
num_machines: 1
num_processes: 2
machine_rank: 0
use_cpu: false
"""


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


@pytest.mark.distributed
def test_two_processes_train(tmp_path):
    """One of them prints; the step is of both. (torchrun: tests/newcomer/two_processes.txt.)"""
    file = tmp_path / "launch.yaml"
    file.write_text(LAUNCH)
    done = launch(["accelerate.commands.launch", "--config_file", str(file)], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("step     2/2") == 1 and "for 2 steps on 2 processes," in done.stdout
    entries = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    # Two trees of four leaves on each process; of each leaf at least prompt, a call and an end.
    assert len(entries) == 2 and min(entry["tree/expanded_tokens"] for entry in entries) > 16 * 4
