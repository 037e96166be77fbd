"""Gradients and parameters of any backend as sketches (:mod:`harts_hf.bench.sketching`), compared between runs.

One is kept for each kind of parameter (a name without the layer's number), so that a wrong gradient of small
parameters does not drown among large ones, and shards are put together first, one parameter at a time.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from harts_hf.bench.sketching import sketch_of

BUCKETS = 64
# Kinds whose part of the whole is smaller are compared with that part of it: their own size is roundings.
SMALLEST = 1e-3

Sketch = dict[str, list[float]]
Read = Callable[[nn.Parameter], "torch.Tensor | None"]


def gradient_of(parameter: nn.Parameter) -> torch.Tensor | None:
    """The whole gradient, the mean over ranks; a collective where ranks hold shards."""
    if hasattr(parameter, "ds_id"):
        from deepspeed.utils import safe_get_full_grad

        found: torch.Tensor | None = safe_get_full_grad(parameter)
        return found
    return _whole(parameter.grad)


def value_of(parameter: nn.Parameter) -> torch.Tensor | None:
    """The whole parameter as the optimizer has it; a collective where ranks hold shards."""
    if hasattr(parameter, "ds_id"):
        from deepspeed.utils import safe_get_full_fp32_param

        found: torch.Tensor | None = safe_get_full_fp32_param(parameter)
        return found
    return _whole(parameter.detach())


def _whole(tensor: Any) -> torch.Tensor | None:
    whole: torch.Tensor | None = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def sketch(parameters: Sequence[tuple[str, nn.Parameter]], read: Read) -> Sketch:
    """Of all parameters, by kind, ``[BUCKETS]`` each; the same signs in every run on one kind of device."""
    found: dict[str, torch.Tensor] = {}
    for number, (name, parameter) in enumerate(parameters):
        whole = read(parameter)
        if whole is None:
            continue
        total = sketch_of(whole, buckets=BUCKETS, seed=number)
        kind = re.sub(r"\.\d+\.", ".", name)
        found[kind] = found.get(kind, 0) + total
    return {kind: total.tolist() for kind, total in found.items()}


def moved(before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]]) -> Sketch:
    """The sketch of what parameters moved by: sketches are linear."""
    return {kind: [b - a for a, b in zip(before[kind], values, strict=True)] for kind, values in after.items()}


def size(one: Mapping[str, Sequence[float]]) -> float:
    """Estimated norm of all parameters together."""
    return math.sqrt(sum(value**2 for values in one.values() for value in values))


def difference(one: Mapping[str, Sequence[float]], other: Mapping[str, Sequence[float]]) -> tuple[float, str]:
    """The largest over kinds of a difference relative to the second, and that kind.

    A kind that only one of them has is infinitely far; so is one that is not finite.
    """
    if one.keys() != other.keys():
        return math.inf, ", ".join(sorted(one.keys() ^ other.keys()))
    floor = SMALLEST * size(other)
    worst, where = 0.0, ""
    for kind, values in other.items():
        apart = math.dist(one[kind], values)
        relative = apart / max(math.hypot(*values), floor) if apart else 0.0
        if not relative <= worst:
            worst, where = (relative if math.isfinite(relative) else math.inf), kind
    return worst, where
