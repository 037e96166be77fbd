"""Compiles Triton kernels for Hopper, which needs no GPU."""

import os
import subprocess
import sys
from pathlib import Path


def compile_for_hopper(script: str) -> str:
    """Runs ``script`` in a process of its own, outside Triton's interpreter, and returns what it prints.

    The script finds what :mod:`support.hopper_launches` has, and the tests' folder on its path.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    tests = str(Path(__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
    script = f"from support.hopper_launches import compile_launches, compiled\n{script}"
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout
