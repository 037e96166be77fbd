"""The oracle: a model in float64, with the many float32 casts of Transformers' modeling code lifted."""

import copy
import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn

from harts_hf.modeling.families import family_of
from harts_hf.modeling.mixers import CONV_FUNCTION
from harts_hf.modeling.patching import causal_lm_of
from harts_hf.verify.layers import LAYERED_BYTES, LayeredOracle

# Bytes per parameter that the oracle holds: itself, a gradient and a sum of gradients, in float64.
_ORACLE_BYTES = 24


def build_oracle(model: nn.Module) -> nn.Module | LayeredOracle | None:
    """A float64 copy of an unpatched model; where that does not fit into memory, an oracle that is wide by layers; or
    None if not even that fits."""
    count = sum(parameter.numel() for parameter in model.parameters())
    free = _free_bytes(next(model.parameters()).device)
    if 1.5 * count * _ORACLE_BYTES > free:
        held = next(model.parameters()).element_size()  # of the gradient that it is compared with
        return LayeredOracle(model) if 1.5 * count * (LAYERED_BYTES + 2 * held) < free else None
    oracle: Any = copy.deepcopy(model).double()
    if hasattr(oracle, "set_experts_implementation"):
        oracle.set_experts_implementation("eager")  # grouped products refuse float64
    return oracle


class _WideTorch(ModuleType):
    """``torch`` with ``float32`` meaning float64, to stand in a modeling module's globals."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def float64_everywhere(model: nn.Module) -> Iterator[None]:
    """Lifts every fp32 cast of the model's family to fp64, for stock and patched models alike.

    Stock layers run Transformers' own PyTorch functions meanwhile, not the kernels of other packages that stand in for
    them where installed (those know no float64). The model itself is moved to float64 by the caller. For a context of
    one thread: names of the family's module and ``torch.Tensor.float`` are exchanged.

    Raises:
        UnsupportedModelError: not one of the supported families.
    """
    family = family_of(causal_lm_of(model))
    module: Any = family.module
    stock_float = torch.Tensor.float
    stock = {name: getattr(module, name) for name in ("torch", CONV_FUNCTION, family.rule_function)}

    def wide_float(tensor: torch.Tensor) -> torch.Tensor:
        frame: Any = sys._getframe(1)
        while frame.f_code is wide_float.__code__:  # of another family, around this
            frame = frame.f_back
        caller = frame.f_globals["__name__"]
        return tensor.double() if caller == module.__name__ else stock_float(tensor)

    for name, value in stock.items():
        setattr(module, name, _WideTorch("torch") if name == "torch" else inspect.unwrap(value))
    torch.Tensor.float = wide_float  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        for name, value in stock.items():
            setattr(module, name, value)
        torch.Tensor.float = stock_float  # type: ignore[method-assign]


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
