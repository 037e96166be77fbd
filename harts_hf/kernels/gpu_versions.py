"""What the GPU path needs, checked when it is first imported, and FLA's alternative backends switched off.

FLA replaces stages of its chunk path by other packages' kernels where it finds them (TileLang, FlashQLA, FlashKDA,
intra-card context parallelism); those take another numerical path, and FlashQLA's depends on the length. A tree
reproduces its trajectories only if all run the same one.
"""

import importlib.metadata
import os
import re

import torch

from harts_hf.errors import UnsupportedModelError

_TRITON_FIXED = (3, 7, 1)
_TRITON_BROKEN_FROM = (3, 4)
_FLA_FROM, _FLA_BELOW = (0, 6), (0, 7)
_OFF = ("FLA_TILELANG", "FLA_FLASH_QLA", "FLA_FLASH_KDA", "FLA_INTRACARD_CP", "FLA_GLUON", "FLA_CONV_GLUON")


def parse_version(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``"3.7.1+git"`` is ``(3, 7, 1)``."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def check_triton(version: str, capability: tuple[int, int]) -> None:
    """Raises UnsupportedModelError for a Triton whose gated backward is wrong on Hopper (FLA issue 640)."""
    found = parse_version(version)
    if capability[0] == 9 and _TRITON_BROKEN_FROM <= found < _TRITON_FIXED:
        raise UnsupportedModelError(
            f"Triton 3.4 to 3.7.0 computes wrong gate gradients on Hopper GPUs: expected >= 3.7.1, got {version} "
            "(pip install 'triton>=3.7.1')"
        )


def check_fla(version: str) -> None:
    """Raises UnsupportedModelError unless ``version`` is an FLA whose stage functions are the ones called here."""
    if not _FLA_FROM <= parse_version(version)[:2] < _FLA_BELOW:
        raise UnsupportedModelError(
            f"expected Flash Linear Attention 0.6.x, got {version} (pip install 'fla-core>=0.6,<0.7')"
        )


def switch_off_fla_backends() -> None:
    """Switches FLA's alternative backends off for this process.

    Raises:
        UnsupportedModelError: one of them is forced on by the environment.
    """
    forced = [name for name in _OFF if os.environ.get(name, "0") != "0"]
    if forced:
        raise UnsupportedModelError(
            f"expected FLA's alternative backends to be off, got {', '.join(forced)} set in the environment"
        )
    os.environ.update(dict.fromkeys(_OFF, "0"))


def assert_fla_backends_off() -> None:
    """Raises UnsupportedModelError if a backend other than FLA's own Triton kernels would serve a stage used here."""
    from fla import backends

    registries = [*backends._operation_registries.values(), *backends._function_registries.values()]
    active = [registry.get_active() for registry in registries if _is_used(registry.operation_name)]
    names = sorted({backend.backend_type for backend in active if backend is not None})
    if names:
        raise UnsupportedModelError(f"expected FLA's own Triton kernels only, got active backends {', '.join(names)}")


def _is_used(operation: str) -> bool:
    return any(part in operation for part in ("common", "gated_delta_rule", "kda"))


def require_linear_attention() -> None:
    """Checks Triton and FLA and switches FLA's alternative backends off.

    Raises:
        UnsupportedModelError: naming what is missing or wrong, and how to get it.
    """
    for package, command in (("triton", "triton>=3.7.1"), ("fla-core", "fla-core>=0.6,<0.7")):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError as error:
            raise UnsupportedModelError(
                f"linear attention on a GPU needs {package} (pip install '{command}')"
            ) from error
        if package == "triton":
            check_triton(version, torch.cuda.get_device_capability())
        else:
            check_fla(version)
    switch_off_fla_backends()
