"""Triton without a GPU: kernels by themselves and launches, compiled for Hopper. Not under Triton's interpreter."""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.errors import OutOfResources

TARGET = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = 232448  # bytes that a block can have


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int = 4, stages: int = 3) -> Any:
    """Triton's compiled kernel; ``types`` are Triton's names of the arguments' types, constants are the rest."""
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    attributes = {
        (position,): [["tt.divisibility", 16]]
        for position, name in enumerate(kernel.arg_names)
        if types.get(name, "").startswith("*")
    }
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=TARGET, options={"num_warps": warps, "num_stages": stages})


def compile_launches() -> list[tuple[str, str]]:
    """From now on launches, on CPU tensors too, compile what they would run and run nothing.

    Returns:
        A list that grows with every launch: the kernel's name, and a hash of what was compiled.

    Raises:
        OutOfResources: Triton's; at a launch that takes more shared memory than there is.
    """
    launched: list[tuple[str, str]] = []
    run = triton.runtime.JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.metadata.shared > SHARED_MEMORY:
            raise OutOfResources(kernel.metadata.shared, SHARED_MEMORY, f"shared memory of {self.fn.__name__}")
        launched.append((self.fn.__name__, kernel.hash))
        return kernel

    triton.runtime.driver.set_active(_Hopper())
    triton.runtime.JITFunction.run = compile_only
    return launched


class _Hopper:
    """A driver that has a target and no GPU."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0
