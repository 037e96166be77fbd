"""A stock linear mixer's own forward on a CPU, without Transformers' advice to install kernels of GPUs.

Transformers (5.24) calls its convolutions and rules through a dispatcher, which warns once per function that a package
is not installed, also where none could run. On a CPU the functions behind it are called directly: the same functions
on the same tensors.
"""

import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from torch import nn
from transformers.integrations import hub_kernels

# Calls that stay the stock forward's: of several sequences in one row, which the dispatcher refuses for the reference
# functions, and by a name that its decorator translates.
_STOCK_ARGUMENTS = ("cu_seq_lens_q", "cu_seqlens", "seq_idx", "cache_params")


def references_of(forward: FunctionType) -> dict[str, Callable[..., Any]]:
    """The functions behind the dispatchers that a forward calls, by name, where these would run them.

    One that has found a package, or that a package of Hub kernels has replaced, is left out.
    """
    found = {}
    for name in forward.__code__.co_names:
        called = forward.__globals__.get(name)
        if isinstance(called, FunctionType) and called.__code__.co_filename == hub_kernels.__file__:
            held = inspect.getclosurevars(called).nonlocals
            reference = held.get("torch_function")
            if reference is not None and held.get("implementation") is reference:
                found[name] = reference
    return found


def may_call_references(mixer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a mixer's call is of one sequence per row, on a CPU, and none of its weights is brought by a hook."""
    hidden_states = args[0] if args else kwargs["hidden_states"]
    return (
        hidden_states.device.type == "cpu"
        and all(kwargs.get(name) is None for name in _STOCK_ARGUMENTS)
        and not any(hasattr(module, "_hf_hook") for module in mixer.children())
    )
