"""Compiles Triton kernels for Hopper, which needs no GPU."""

import os
import subprocess
import sys


def compile_for_hopper(script: str) -> str:
    """Runs ``script`` in a process of its own, outside Triton's interpreter, and returns what it prints.

    The script finds ``compiled(kernel, types, constants, warps=4, stages=3)``: ``types`` are Triton's names of the
    arguments' types by name, constants are the rest; it returns Triton's compiled kernel. After
    ``compile_launches()``, launches on CPU tensors compile what they would run and run nothing; the list that it
    returns names them.
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


class _Hopper:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_launches():
    launched, run = [], triton.runtime.JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        launched.append((self.fn.__name__, kernel.hash))
        return kernel

    triton.runtime.driver.set_active(_Hopper())
    triton.runtime.JITFunction.run = compile_only
    return launched


"""
