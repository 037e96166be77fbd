"""Norms, gates and experts of stock models as single operations, within a forward on a tree and on a GPU alone.

Modules are exchanged as mixers are: the instance gets a subclass of its class, whose forward is the stock one except
while a layer runs for a tree. Nothing of a model file is copied, parameters stay where they are, and
:func:`harts_hf.unpatch` gives the classes back. On the CPU, and without a plan, the stock forward runs as it is.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from harts_hf.errors import UnsupportedModelError
from harts_hf.kernels.rowwise import rotate
from harts_hf.modeling.exchanged import Exchanged
from harts_hf.modeling.families import Family
from harts_hf.modeling.fused_forwards import IS_FOR, Forward
from harts_hf.modeling.routing import routing
from harts_hf.modeling.tree_pass import TreePass

Pair = tuple[nn.Module, type[nn.Module]]

# Whether a layer runs for a tree, and its modules may be fused; a recomputation runs on a thread of autograd's.
_state = threading.local()


class FusedModule(Exchanged):
    """Marks a module, or a layer, whose class :func:`harts_hf.patch` exchanged; never instantiated by itself."""


@contextmanager
def fusing(wanted: bool) -> Iterator[None]:
    """Inside, and on this thread, fused modules run as one operation if that is wanted."""
    before = getattr(_state, "fuses", False)
    _state.fuses = wanted
    try:
        yield
    finally:
        _state.fuses = before


def fuses(x: torch.Tensor) -> bool:
    """Whether a fused module is to run as one operation on this input."""
    return x.is_cuda and getattr(_state, "fuses", False)


def find_fused(model: nn.Module, family: Family) -> list[Pair]:
    """Modules of a model and the classes to give them: its layers, and what its family has fused.

    A module whose forward was replaced, or whose settings are not those that an operation is for (another activation,
    biases), is left as it is.
    """
    known = {family.class_named(name): made for name, made in family.fused_modules.items()}
    mixers = (family.class_named(family.linear_mixer), family.class_named(family.full_mixer))
    found: list[Pair] = []  # mypy does not see that classes are hashable
    for module in model.modules():
        stock = type(module)
        if "forward" in vars(module):
            continue
        if isinstance(module, GradientCheckpointingLayer) and any(isinstance(m, mixers) for m in module.children()):
            found.append((module, _layer_class(stock)))  # type: ignore[arg-type]
        elif stock in known and IS_FOR.get(known[stock], lambda _: True)(module):
            found.append((module, _fused_class(stock, known[stock])))  # type: ignore[arg-type]
    return found


def check_layers(model: nn.Module) -> None:
    """Refuses a model with a layer that would not replay routes when checkpointing computes it again.

    Raises:
        UnsupportedModelError: a layer whose forward was replaced before :func:`harts_hf.patch`.
    """
    for name, module in model.named_modules():
        if isinstance(module, GradientCheckpointingLayer) and not isinstance(module, FusedModule):
            raise UnsupportedModelError(
                f"expected layers with the forward of their class where routes are replayed, got another one on {name}"
            )


@lru_cache
def _layer_class(stock: type[nn.Module]) -> type[nn.Module]:
    """A layer that tells its modules, also when checkpointing computes it again, that it runs for a tree."""

    def forward(self: nn.Module, *args: Any, harts: TreePass | None = None, **kwargs: Any) -> Any:
        if harts is None:
            return stock.forward(self, *args, **kwargs)
        with fusing(harts.fused_modules), routing(harts):
            return stock.forward(self, *args, harts=harts, **kwargs)

    return _subclass(stock, forward)


@lru_cache
def _fused_class(stock: type[nn.Module], fused: Forward) -> type[nn.Module]:
    def forward(self: nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (fused if fuses(x) else stock.forward)(self, x, *args, **kwargs)

    return _subclass(stock, forward)


def _subclass(stock: type[nn.Module], forward: Forward) -> type[nn.Module]:
    # The stock name stays, since Transformers, PEFT and FSDP settings find modules by class name.
    return type(
        stock.__name__, (stock, FusedModule), {"forward": forward, "__module__": stock.__module__, "stock": stock}
    )


def rotary_of(family: Family) -> dict[str, Forward]:
    """The function of a family's module through which its attention turns queries and keys, as one operation each."""
    name, interleaved = family.rotary_function, family.rotates_pairs
    if name is None:
        return {}
    stock: Forward = getattr(family.module, name)

    def turned(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any) -> Any:
        if args or not fuses(q):
            return stock(q, k, cos, sin, *args)
        return rotate(q, cos, sin, interleaved=interleaved), rotate(k, cos, sin, interleaved=interleaved)

    return {name: turned}


def expanded_latents(self: Any, latents: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values ``[1, H, N, D]`` of an MLA's latents ``[1, 1, N, L]`` and rotary keys ``[1, 1, N, R]``, rows
    first in memory: one copy, whose backward is views, where stock layers write into slices of an empty tensor."""
    both = self.kv_b_proj(latents).squeeze(1).unflatten(-1, (-1, self.qk_nope_head_dim + self.v_head_dim))
    keys, values = both.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
    keys = torch.cat([keys, rotary.transpose(1, 2).expand(-1, -1, keys.shape[2], -1)], dim=-1)
    return keys.transpose(1, 2), values.transpose(1, 2)
