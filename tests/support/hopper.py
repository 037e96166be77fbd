"""Compiles Triton kernels for Hopper, which needs no GPU."""

import os
import subprocess
import sys


def compile_for_hopper(script: str) -> str:
    """Runs ``script`` in a process of its own, outside Triton's interpreter, and returns what it prints.

    The script finds ``compiled(kernel, types, constants, warps=4, stages=3)``: ``types`` are Triton's names of the
    arguments' types by name, constants are the rest; it returns Triton's compiled kernel.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    result = subprocess.run(
        [sys.executable, "-c", _PRELUDE + script], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


_PRELUDE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def compiled(kernel, types, constants, warps=4, stages=3):
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    attributes = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(kernel.arg_names)
                  if types.get(name, "").startswith("*")}
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages})


"""
