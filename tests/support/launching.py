"""Starts a script on several processes, as users do, and waits no longer than a time-out."""

import os
import subprocess
import sys
from pathlib import Path

TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
# MULTI_GPU starts as many processes as it is told to; with use_cpu=True in the trainer's arguments they use gloo.
ACCELERATE = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1", "--mixed_precision", "no",
              "--dynamo_backend", "no", "--main_process_port", "0")  # fmt: skip


def launch(
    script: Path, *arguments: object, count: int = 2, launcher: tuple[str, ...] = TORCHRUN, timeout: float = 600
) -> subprocess.CompletedProcess:
    """What a launcher returned and printed; an error if it did not end in time."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])),
    }
    number = "--nproc_per_node" if launcher == TORCHRUN else "--num_processes"
    command = [sys.executable, *launcher, number, str(count), str(script), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)


def run_processes(script: Path, *arguments: object, count: int = 2, timeout: float = 600) -> None:
    """Asserts that the script ended well on all processes."""
    done = launch(script, *arguments, count=count, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
