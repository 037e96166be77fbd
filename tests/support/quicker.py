"""What trainings of tiny models spend a third of their time on, which no test is about."""

import functools
import gc
from types import SimpleNamespace

import accelerate.utils.imports
import accelerate.utils.memory


def make_trainings_quicker() -> None:
    """Whether a package is installed is read once, and the end of a training collects young garbage alone.

    Accelerate reads the metadata of DeepSpeed and PEFT for every forward, and each training's end looks through all
    that was imported. Old garbage is found by Python's own collections.
    """
    imports: object = accelerate.utils.imports
    imports._is_package_available = functools.cache(imports._is_package_available)
    accelerate.utils.memory.gc = SimpleNamespace(collect=functools.partial(gc.collect, 1))
