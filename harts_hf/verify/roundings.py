"""What roundings may do to a result: the same computation with every number that it reads moved at random.

Monte Carlo arithmetic (Parker, 1997): where the results of such runs scatter, no result is exact to more than their
scatter, be it that numbers cancel (a query's gradient where there is one key only) or that a small one is divided by.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# A number is moved by epsilon times itself. A rounding moves it by up to half the distance to the next number, which
# is between half and all of that: by epsilon / 4.7 in RMS, if numbers are spread evenly over their logarithms.
ROUNDING_PER_MOVE = math.sqrt(3 / 8 / math.log(2) / 12)
# Operations that hand numbers on as they are, compare them or count them (experts, whose numbers are held as floats).
# fmt: off
_EXACT = frozenset((
    "_to_copy", "clone", "copy", "cat", "stack", "repeat", "flip", "neg", "where", "tril", "triu", "masked_fill",
    "constant_pad_nd", "embedding", "gather", "index", "index_select", "index_put", "slice_scatter", "select_scatter",
    "slice_backward", "select_backward", "max", "argmax", "sort", "topk", "zeros_like", "ones_like", "full_like",
    "empty_like", "histc", "floor", "ceil", "round", "eq", "ne", "lt", "le", "gt", "ge", "new_zeros",
    "new_ones", "new_full", "new_empty", "new_empty_strided",
))
# fmt: on


def _counts(kwargs: dict[str, Any] | None) -> bool:
    """Whether an operation is to give integers: where experts' rows end are sums of counts that are held as floats."""
    dtype = (kwargs or {}).get("dtype")
    return isinstance(dtype, torch.dtype) and not dtype.is_floating_point


class RandomRoundings(TorchDispatchMode):
    """Within it every floating-point number that an operation of PyTorch reads is moved by epsilon, up or down.

    Each reading moves it anew, in the forward and in the backward; epsilon is that of the number's dtype, and 0 stays
    0. ``ROUNDING_PER_MOVE`` times a result's change is the effect of one rounding per reading. Left alone are what an
    operation writes to, operations that only copy, and kernels that PyTorch's dispatcher does not call.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator(device).manual_seed(seed)

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        schema = func._schema
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns)
        if is_view or schema.name.removeprefix("aten::").rstrip("_") in _EXACT or _counts(kwargs):
            return func(*args, **(kwargs or {}))
        moved = [
            value if given.alias_info is not None else self._moved(value)
            for given, value in zip(schema.arguments, args, strict=False)
        ]
        return func(*moved, **(kwargs or {}))

    def _moved(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(self._moved, value))
        device = self._generator.device
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.device != device:
            return value
        epsilon = torch.finfo(value.dtype).eps
        up = torch.randint(0, 2, value.shape, generator=self._generator, device=device, dtype=torch.int8)
        return value * (1 - epsilon + 2 * epsilon * up.to(value.dtype))
