"""Selective activation checkpointing: products are kept, what lies between them is computed again.

A layer under full checkpointing (Chen et al., arXiv 1604.06174) is computed twice. Here the results of its matrix
products, dense and grouped, are kept: they take much time for their bytes (the name is that of Korthikanti et al.,
arXiv 2205.05198, section 5, who keep all but attention's scores). PyTorch's
:func:`torch.utils.checkpoint.create_selective_checkpoint_contexts` does it, below autograd and by operation; gradients
are the same bits.

Our kernels on a tree (attention, the linear rule, the convolution) are computed again as a whole: to PyTorch they are
functions, not operations, and products within them change their results in place.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

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

# Whether a kernel on a tree runs on this thread; recomputations run on threads of autograd's.
_state = threading.local()


@contextmanager
def computed_again() -> Iterator[None]:
    """Inside, and on this thread, selective checkpointing keeps nothing."""
    before = getattr(_state, "keeps_nothing", False)
    _state.keeps_nothing = True
    try:
        yield
    finally:
        _state.keeps_nothing = before


def keep_products(model: PreTrainedModel) -> None:
    """Makes a model's activation checkpointing selective, whenever and however it is switched on.

    Args:
        model: a causal language model of Transformers, without a wrapper.
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


def _make_selective(model: nn.Module) -> None:
    context = functools.partial(create_selective_checkpoint_contexts, _policy)
    for module in model.modules():
        function = vars(module).get("_gradient_checkpointing_func")
        if function is not None and getattr(function, "keywords", {}).get("context_fn") is None:
            module._gradient_checkpointing_func = functools.partial(function, context_fn=context)  # type: ignore[assignment]


def _policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operation.name().partition(".")[0] in _PRODUCTS and not getattr(_state, "keeps_nothing", False):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
