"""The states of many conversations, one row each: taken, repeated, and joined with others of other lengths.

A row's keys and values are padded on the left to the longest row's, and masked there. Recurrent and convolution states
have no such room: they cannot be rewound, and padding *between* real tokens would decay them and enter the convolution
(transformers issue 47086). So tokens that continue a state are as many in every row; only rows that have read nothing
yet may be padded, on the left: there a state of zeros stays zero, because the model zeroes padded hidden states.

All six supported families continue both states in a forward of several tokens (their chunkwise rule takes the state,
their convolution gets the columns before), so none of them is fed token by token. That was tried for each, and
``tests/rollouts/engines/test_states.py`` tries it again.
"""

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from harts_hf.rollouts.engines.engine import EngineError
from harts_hf.rollouts.engines.routes import ReadRoutes, RouterTap


class RowStates:
    """What a model remembers of R conversations.

    Attributes:
        lengths: ``[R]`` tokens that each row has read. Keys and values have as many columns as the longest row.
        routes: ``[R]`` experts of those tokens; None where nobody notes them.
    """

    def __init__(
        self, cache: DynamicCache, lengths: Sequence[int], routes: Sequence[ReadRoutes | None] | None = None
    ) -> None:
        self._cache = cache
        self.lengths = list(lengths)
        self.routes: list[ReadRoutes | None] = [None] * len(lengths) if routes is None else list(routes)

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def zero(cls, model: PreTrainedModel) -> "RowStates":
        """One row that has read nothing, with states of zeros, so that the first token is like every other.

        What is returned is not to be read into: take rows of it.

        Raises:
            EngineError: the model keeps no states, or ones that cannot be joined.
        """
        kind = (model.device, model.dtype)
        if model not in _ZEROS or _ZEROS[model][0] != kind:
            _ZEROS[model] = (kind, _zero_cache(model))
        return cls(_ZEROS[model][1], [0])

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(
            tensor.numel() * tensor.element_size() for layer in self._cache.layers for tensor in _tensors_of(layer)
        )

    @torch.no_grad()
    def read(self, model: PreTrainedModel, tokens: Sequence[Sequence[int]], *, tap: RouterTap | None = None) -> Tensor:
        """Has each row read its next tokens.

        Args:
            model: the one that made the states.
            tokens: for each of the R rows, at least one; as many in every row, except where no row has read any yet.
            tap: notes the experts of the tokens.

        Returns:
            ``[R, V]`` logits of each row's next token.
        """
        before = max(self.lengths)
        size = max(map(len, tokens))
        assert before == 0 or min(map(len, tokens)) == size, "padding would enter the states"
        self.lengths = [length + len(row) for length, row in zip(self.lengths, tokens, strict=True)]
        width = before + size
        device = model.device
        padding = torch.tensor([[width - length] for length in self.lengths], device=device)
        columns = torch.arange(width, device=device)
        with tap or nullcontext():
            output = model(
                input_ids=torch.tensor([[0] * (size - len(row)) + list(row) for row in tokens], device=device),
                # Without padding no mask at all: the same kernels as for one conversation alone.
                attention_mask=(columns >= padding).long() if min(self.lengths) < width else None,
                position_ids=(columns[before:] - padding).clamp(min=0),
                cache=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
        if tap is not None:
            experts = tap.experts(len(tokens))
            self.routes = [
                ReadRoutes(before, experts[row, size - len(of_row) :], length)
                for row, (before, of_row, length) in enumerate(zip(self.routes, tokens, self.lengths, strict=True))
            ]
        logits: Tensor = output.logits[:, -1]
        return logits

    def take(self, rows: Sequence[int]) -> "RowStates":
        """These rows, in this order; a row may be named several times or never. Nothing is shared that changes."""
        return join([(self, rows)])


# By model: its shapes are known only by trying, which would cost a small model as much as several tokens each time.
_ZEROS: WeakKeyDictionary[PreTrainedModel, tuple[Any, DynamicCache]] = WeakKeyDictionary()


@torch.no_grad()
def _zero_cache(model: PreTrainedModel) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    layer: Any
    for index, layer in enumerate(cache.layers):
        if (kind := type(layer)) not in (DynamicLayer, LinearAttentionLayer):
            raise EngineError(
                "expected layers that remember keys and values, or recurrent and convolution states, got "
                f"{kind.__name__} for layer {index}"
            )
    model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), cache=cache, use_cache=True)
    for index, layer in enumerate(cache.layers):
        if not _tensors_of(layer):
            raise EngineError(f"expected the model to write into the cache it is given, got nothing in layer {index}")
        if isinstance(layer, LinearAttentionLayer):
            for state in _tensors_of(layer):
                state.zero_()
        else:
            layer.keys, layer.values = layer.keys[..., :0, :], layer.values[..., :0, :]
    return cache


def join(parts: Sequence[tuple[RowStates, Sequence[int]]]) -> RowStates:
    """Rows of several states, one below the other.

    Args:
        parts: states of one model, and which of their rows; at least one row in all.

    Returns:
        The rows in the order given, with columns for the longest of them. Reading into it leaves the parts alone.
    """
    parts = [(part, rows) for part, rows in parts if rows]
    lengths = [part.lengths[row] for part, rows in parts for row in rows]
    routes = [part.routes[row] for part, rows in parts for row in rows]
    width = max(lengths)
    caches = [part._cache for part, _ in parts]
    indices = [torch.tensor(rows, device=_device_of(cache)) for cache, (_, rows) in zip(caches, parts, strict=True)]
    joined = copy.copy(caches[0])
    joined.layers = []
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        layer: Any = copy.copy(layers[0])
        if isinstance(layer, LinearAttentionLayer):
            layer.conv_states = _cat_states([old.conv_states for old in layers], indices)
            layer.recurrent_states = _cat_states([old.recurrent_states for old in layers], indices)
            layer.has_previous_state = dict(layer.has_previous_state)
        else:
            layer.keys = torch.cat(
                [_aligned(old.keys, rows, width) for old, rows in zip(layers, indices, strict=True)]
            )
            layer.values = torch.cat(
                [_aligned(old.values, rows, width) for old, rows in zip(layers, indices, strict=True)]
            )
        joined.layers.append(layer)
    return RowStates(joined, lengths, routes)


def _cat_states(states: Sequence[dict[int, Tensor | None]], indices: Sequence[Tensor]) -> dict[int, Tensor | None]:
    # Always copies: the model writes into these.
    slots: dict[int, Tensor | None] = {}
    for slot in states[0]:
        rows = [
            state.index_select(0, index)
            for state, index in zip((old[slot] for old in states), indices, strict=True)
            if state is not None
        ]
        slots[slot] = (torch.cat(rows) if len(rows) > 1 else rows[0]) if rows else None
    return slots


def _aligned(columns: Tensor, rows: Tensor, width: int) -> Tensor:
    """These rows of keys or values ``[R, H, T, D]``, cut or padded on the left to ``width`` columns."""
    missing = width - columns.shape[-2]
    kept = columns[..., max(-missing, 0) :, :].index_select(0, rows)
    return F.pad(kept, (0, 0, missing, 0)) if missing > 0 else kept


def _tensors_of(layer: Any) -> list[Tensor]:
    if isinstance(layer, LinearAttentionLayer):
        tensors = [*layer.conv_states.values(), *layer.recurrent_states.values()]
    else:
        tensors = [layer.keys, layer.values]
    return [tensor for tensor in tensors if tensor is not None]


def _device_of(cache: DynamicCache) -> torch.device:
    return _tensors_of(cache.layers[0])[0].device
