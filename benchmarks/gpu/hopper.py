"""A process without a GPU that others take for one with an H200: what is compiled there, no kernel runs."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

SHARED_MEMORY = 232448  # bytes that a block can have
PROCESSORS = 132


def pretend() -> None:
    """What FLA, FA4 and the GPU path ask for when they are imported."""
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_name = lambda *_: "NVIDIA H200"
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=PROCESSORS, name="NVIDIA H200")
    torch.cuda.device_count = lambda: 1


def _set_driver() -> None:
    """Triton's, with a target and no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", 90, 32)
    driver = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        utils=SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": SHARED_MEMORY}),
    )
    triton.runtime.driver.set_active(driver)


def no_launches() -> None:
    """From now on Triton's kernels do nothing, on tensors of any device."""
    import triton

    for launcher in (triton.runtime.JITFunction, triton.runtime.Autotuner, triton.runtime.autotuner.Heuristics):
        launcher.run = lambda self, *args, **kwargs: None
    _set_driver()


def compile_launches(launched: Callable[[str, str], None], tuned: Callable[[str, tuple], None]) -> None:
    """From now on launches of Triton's kernels, on CPU tensors too, compile what they would run and run nothing.

    Args:
        launched: called with the name of each kernel that would be launched, and a hash of what was compiled.
        tuned: called with the name and the key of each kernel that FLA would tune first.

    Raises:
        OutOfResources: Triton's; at a launch that takes more shared memory than there is.
    """
    import triton
    from triton.runtime.errors import OutOfResources

    run = triton.runtime.JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.metadata.shared > SHARED_MEMORY:
            raise OutOfResources(kernel.metadata.shared, SHARED_MEMORY, f"shared memory of {self.fn.__name__}")
        launched(self.fn.__name__, kernel.hash)
        return kernel

    def first_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        from fla.ops.utils.cache import AutotuneKey

        self.nargs = dict(zip(self.arg_names, args, strict=False))
        key = AutotuneKey.build(self.arg_names, self.keys, args, kwargs).autotune_key
        config = self.cache.get(key)
        if config is None and len(self.configs) > 1:
            tuned(self.base_fn.__name__, key)
        config = config or self.prune_configs(kwargs)[0]
        return self.fn.run(*args, **{**kwargs, **config.all_kwargs()})

    _set_driver()
    triton.runtime.JITFunction.run = compile_only
    triton.runtime.Autotuner.run = first_config
