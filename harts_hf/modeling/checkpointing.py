"""Selective activation checkpointing: products are kept, what lies between them is computed again.

A layer under full checkpointing (Chen et al., arXiv 1604.06174) is computed twice. Here the results of its dense and
grouped products are kept: they take much time for their bytes (the name is that of Korthikanti et al., arXiv
2205.05198, section 5, who keep all but attention's scores). PyTorch's
:func:`torch.utils.checkpoint.create_selective_checkpoint_contexts` does it, below autograd and by operation; gradients
are the same bits.

Its modes look at every operation in Python, which takes longer than most of a layer's. So they are entered around the
modules that multiply alone: linear layers and experts. Our kernels on a tree (attention, the linear rule, the
convolution) are computed again.
"""

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

CHECKPOINTING = ("full", "selective")

_SET = "_set_gradient_checkpointing"
_PRODUCTS = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::_grouped_mm",
    "transformers::grouped_mm_fallback",
)


class _State(threading.local):
    """Of a thread: a recomputation runs on one of autograd's.

    Attributes:
        layer: that runs; None outside of checkpoints.
        depth: of modules that multiply and that are running.
        mode: that the outermost of them runs in.
    """

    layer: "_Layer | None" = None
    depth = 0
    mode: Any = None


_state = _State()


def keep_products(model: PreTrainedModel) -> None:
    """Makes a model's activation checkpointing selective, whenever and however it is switched on.

    Args:
        model: a causal language model of Transformers, without a wrapper; adapters are in it by now.
    """
    if _SET in vars(model):
        return
    stock: Callable[..., None] = getattr(model, _SET)

    @functools.wraps(stock)
    def set_checkpointing(*args: Any, **kwargs: Any) -> None:
        stock(*args, **kwargs)
        _make_selective(model)

    setattr(model, _SET, set_checkpointing)
    _make_selective(model)
    layers = (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
    for module in (module for layer in layers for module in layer.modules()):
        if isinstance(module, nn.Linear) or type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(_enter)
            module.register_forward_hook(_leave, always_call=True)


def _make_selective(model: nn.Module) -> None:
    for module in model.modules():
        function = vars(module).get("_gradient_checkpointing_func")
        if function is not None and getattr(function, "keywords", {}).get("context_fn") is not _contexts:
            module._gradient_checkpointing_func = functools.partial(function, context_fn=_contexts)  # type: ignore[assignment]


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Around a layer's forward, and around its recomputation."""
    calls: list[Any] = []
    return _Layer(calls, is_first=True), _Layer(calls, is_first=False)


class _Layer(AbstractContextManager[None]):
    """A layer's forward or recomputation.

    Args:
        calls: of modules that multiply, in order, PyTorch's pair of modes for each: one keeps its products in the
            forward, the other gives them in the recomputation.
        is_first: whether it is the forward.
    """

    def __init__(self, calls: list[Any], *, is_first: bool) -> None:
        self._calls, self._is_first = calls, is_first
        self._position = 0

    def next_mode(self) -> Any:
        """Of the next call."""
        if self._is_first:
            keeping, kept = create_selective_checkpoint_contexts(_policy)
            self._calls.append(kept)
            return keeping
        self._position += 1
        return self._calls[self._position - 1]

    def __enter__(self) -> None:
        self._before, _state.layer = _state.layer, self
        self._position = 0

    def __exit__(self, *_: object) -> None:
        _state.layer = self._before


def _enter(*_: Any) -> None:
    if _state.layer is None:
        return
    if _state.depth == 0:
        _state.mode = _state.layer.next_mode()
        _state.mode.__enter__()
    _state.depth += 1


def _leave(*_: Any) -> None:
    # A recomputation that has all it needs stops within a module, by an exception: this runs all the same.
    if _state.layer is None:
        return
    _state.depth -= 1
    if _state.depth == 0:
        _state.mode.__exit__(None, None, None)
        _state.mode = None


def _policy(_: Any, operation: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = operation.name().partition(".")[0] in _PRODUCTS
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE
