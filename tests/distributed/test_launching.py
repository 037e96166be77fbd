"""`harts train` on two processes, by a real launcher and with DeepSpeed; one that starts one: test_launchers.py."""

import json
import os
import select
import signal
import subprocess
from pathlib import Path

import pytest
from safetensors import safe_open
from support.launching import launch, run_processes, write_python

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


@pytest.mark.distributed
def test_forks_that_stand_in_for_python(tmp_path):
    """What launchers and transcripts start: streams, status, arguments and signals are those of a process."""
    python = write_python(tmp_path / "python", "packages")
    code = "import sys; print(sys.stdin.read(), sys.argv, sys.executable); sys.exit('no')"
    done = subprocess.run(
        [python, "-u", "-c", code, "a b"], input="read", capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.stdout, done.stderr) == (f"read ['-c', 'a b'] {python}\n", "no\n") and done.returncode == 1
    sleeps = [python, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"]
    for signal_, returncode in ((signal.SIGTERM, -15), (signal.SIGKILL, -9)):
        process = subprocess.Popen(sleeps, stdout=subprocess.PIPE, text=True)
        fork = os.pidfd_open(int(process.stdout.readline()))
        process.send_signal(signal_)
        assert process.wait(10) == returncode and select.select([fork], [], [], 10)[0]
        process.stdout.close()
        os.close(fork)


@pytest.mark.distributed
def test_two_processes_train(tmp_path):
    """One of them prints; the step is of both. (torchrun: tests/newcomer/two_processes.txt.)"""
    file = tmp_path / "launch.yaml"
    file.write_text(LAUNCH)
    train = ["-m", "harts_hf.cli", "train", "recipes/tiny_grpo.yaml", *SMALL, "--output_dir", tmp_path / "out"]
    done = launch(
        tmp_path, *train, launcher=("-m", "accelerate.commands.launch", "--config_file", str(file)), cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("step     2/2") == 1 and "for 2 steps on 2 processes," in done.stdout
    entries = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    # Two trees of four leaves on each process; of each leaf at least prompt, a call and an end.
    assert len(entries) == 2 and min(entry["tree/expanded_tokens"] for entry in entries) > 16 * 4


@pytest.mark.distributed
@pytest.mark.exhaustive
def test_zero3_by_an_option(tmp_path):
    """A model with random weights, built in parts by two processes on CPUs; what is saved is whole."""
    settings = {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}}
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    file, out = tmp_path / "zero3.json", tmp_path / "out"
    file.write_text(json.dumps({**settings, **dict.fromkeys(sizes, "auto")}))
    options = [*SMALL, "--deepspeed", file, "--output_dir", out]
    run_processes(ROOT / "harts_hf" / "cli" / "__main__.py", "train", ROOT / "recipes" / "tiny_grpo.yaml", *options)
    logs = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(logs) == 2 and all(log["tree/sharing_ratio"] > 1 for log in logs)
    with safe_open(out / "model.safetensors", "pt") as weights:
        assert all(weights.get_tensor(name).numel() > 0 for name in weights.keys())  # noqa: SIM118 - no dictionary
