"""What a rollout function returns as ``routed_experts``, checked and made the routes of a model's routers."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from harts_hf.modeling import find_routers
from harts_hf.runtime.routes import UNKNOWN, TokenRoutes


@dataclass(frozen=True, kw_only=True)
class RouterShape:
    """What a model's routes look like.

    Attributes:
        layers: numbers of the layers with a router, ascending.
        num_layers: of the model.
        num_experts: of a layer.
        top_k: experts of a token in a layer.
    """

    layers: tuple[int, ...]
    num_layers: int
    num_experts: int
    top_k: int

    @classmethod
    def of(cls, model: Any) -> "RouterShape | None":
        """A causal language model's; None for one without routers."""
        routers = find_routers(model)
        if not routers:
            return None
        names = {module: name for name, module in model.named_modules()}
        layers = [int(re.findall(r"\.(\d+)\.", names[router])[-1]) for router in routers]
        config = model.config
        return cls(
            layers=tuple(layers),
            num_layers=config.num_hidden_layers,
            num_experts=config.num_experts,
            top_k=config.num_experts_per_tok,
        )


def read_routed_experts(rows: Sequence[Any], lengths: Sequence[int], shape: RouterShape) -> list[TokenRoutes | None]:
    """Routes of rows.

    Args:
        rows: for each row an array ``[t, L, k]`` of integers, or a list of such arrays, one behind the other: the
            experts of its first tokens (prompt, then completion) in each layer, or in each layer with a router; None
            for none. -1 where a token's are not known. Arrays that several rows share (the same objects) are kept
            once.
        lengths: tokens of each row.
        shape: of the model's.

    Raises:
        ValueError: what is not of this form, or not of this model.
    """
    if not hasattr(rows, "__len__") or len(rows) != len(lengths):
        raise ValueError(f"expected 'routed_experts' to have {len(lengths)} entries, one per row, got {_said(rows)}")
    # By id: with the array itself, since another one made while rows are gone through may get the id of one let go.
    known: dict[int, tuple[Any, torch.Tensor]] = {}
    found: list[TokenRoutes | None] = []
    for row, (value, length) in enumerate(zip(rows, lengths, strict=True)):
        if value is None:
            found.append(None)
            continue
        pieces = []
        for piece in _pieces(value):
            if id(piece) not in known:
                known[id(piece)] = piece, _read(piece, f"routed_experts[{row}]", shape)
            pieces.append((known[id(piece)][1], None))
        routes = TokenRoutes(tuple(pieces))
        if len(routes) > length:
            raise ValueError(
                f"expected routed_experts[{row}] of at most {length} tokens (prompt and completion), got {len(routes)}"
            )
        found.append(routes if len(routes) else None)
    return found


def _pieces(value: Any) -> list[Any]:
    """A list of arrays; nested lists are one array."""
    is_list = isinstance(value, list | tuple) and all(getattr(one, "ndim", 0) == 3 for one in value)
    return list(value) if is_list else [value]


def _read(value: Any, name: str, shape: RouterShape) -> torch.Tensor:
    """``[t, L, k]`` int16, layers with a router, experts of each ascending."""
    array = _array(value, name)
    counts = (len(shape.layers), shape.num_layers)
    fits = array.ndim == 3 and array.shape[1] in counts and array.shape[2] == shape.top_k
    if not fits or array.dtype.kind not in "iu":
        layers = " or ".join(str(count) for count in dict.fromkeys(counts))
        raise ValueError(
            f"expected {name} to hold integers of shape [tokens, {layers} layers, {shape.top_k} experts], got "
            f"{array.dtype} {list(array.shape)}"
        )
    if array.shape[1] != len(shape.layers):
        array = array[:, list(shape.layers)]
    if array.size and not UNKNOWN <= array.min() <= array.max() < shape.num_experts:
        wrong = array.min() if array.min() < UNKNOWN else array.max()
        raise ValueError(f"expected experts in [0, {shape.num_experts}) in {name}, or -1, got {wrong}")
    array = np.sort(array.astype(np.int64), axis=-1)
    is_unknown = array == UNKNOWN
    repeats = ((np.diff(array, axis=-1) == 0) & ~is_unknown[..., 1:]).any(axis=-1)
    wrong_at = np.argwhere(repeats | (is_unknown.any(axis=-1) & ~is_unknown.all(axis=-1)))
    if len(wrong_at):
        token, layer = wrong_at[0]
        raise ValueError(
            f"expected {shape.top_k} different experts of each token in {name} (or -1 for all of them), got "
            f"{array[token, layer].tolist()} for token {token} in layer {shape.layers[layer]}"
        )
    return torch.from_numpy(array.astype(np.int16))


def _array(value: Any, name: str) -> np.ndarray[Any, Any]:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return (value.double() if value.is_floating_point() else value).numpy()  # NumPy knows no bfloat16
    try:
        return np.asarray(value)
    except ValueError as error:
        raise ValueError(f"expected {name} to be an array, or lists of the same lengths, got {error}") from error


def _said(value: Any) -> str:
    return str(len(value)) if hasattr(value, "__len__") else type(value).__name__
