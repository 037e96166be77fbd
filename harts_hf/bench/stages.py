"""How long the stages of forwards and backwards take that share differently: attention, the linear rule, the head.

Between two marks, identity functions of autograd, lies a stage: its forward is from the first to the second, its
backward from the second to the first. Autograd runs what was computed last first, so what lies between two
marks stays between. Recomputation under checkpointing is a forward too, and counts.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch as replaced

import torch

from harts_hf.kernels.attention import flash
from harts_hf.kernels.attention.flash_blocks import block_lists
from harts_hf.modeling import forwards, mixers

STAGES = ("attention", "rule", "head")
# Products of a tile in FlashAttention's forward and backward.
TILE_PRODUCTS = (2, 5)


class StageClock:
    """Seconds of stages while :meth:`watching`.

    Args:
        device: where the model is.
        counts: asked at each stage whether it counts.
    """

    def __init__(self, device: torch.device, counts: Callable[[], bool] = lambda: True) -> None:
        self._is_cuda = device.type == "cuda"
        self._counts = counts
        self._spans: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
        self._open: dict[str, list[Any]] = defaultdict(list)
        self._areas: dict[int, tuple[Any, Any]] = {}  # by microbatch; its intervals are kept, so that ids stay theirs

    @property
    def attention_area(self) -> float | None:
        """Of the tiles that FlashAttention-4 visits, products counted; None where it does not run."""
        if not self._areas:
            return None
        return float(sum(float(area) for _, area in self._areas.values()))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the package's operations are timed, in every model that runs on a tree."""
        rule_on = mixers.rule_on
        with ExitStack() as stack:
            for module, name, exchanged in (
                (mixers, "tree_attention", self._attention(mixers.tree_attention)),
                (mixers, "rule_on", lambda p, layer, rule: rule_on(p, layer, self._timed("rule", rule))),
                (forwards, "token_logprobs", self._timed("head", forwards.token_logprobs)),
            ):
                stack.enter_context(replaced.object(module, name, exchanged))
            yield

    def seconds(self) -> dict[str, float]:
        """Of all that was watched, forwards and backwards, by :data:`STAGES`."""
        if self._is_cuda:
            torch.cuda.synchronize()
            return {stage: sum(start.elapsed_time(end) for start, end in self._spans[stage]) / 1e3 for stage in STAGES}
        return {stage: sum(end - start for start, end in self._spans[stage]) for stage in STAGES}

    def _attention(self, function: Any) -> Any:
        timed = self._timed("attention", function)

        def noted(query: Any, key: Any, value: Any, intervals: Any, **options: Any) -> Any:
            is_new = self._is_cuda and id(intervals) not in self._areas and self._counts()
            if is_new and not flash.unsupported_because(query, value):
                tiles = flash.tiles_of(query.shape[3], value.shape[3])
                area = sum(
                    products
                    * tile[0]
                    * tile[1]
                    * block_lists(intervals, query.shape[2], tile, by_key=by_key).num_tiles
                    for products, tile, by_key in zip(TILE_PRODUCTS, tiles, (False, True), strict=True)
                )
                self._areas[id(intervals)] = intervals, area
            return timed(query, key, value, intervals, **options)

        return noted

    def _timed(self, stage: str, function: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self._counts():
                return function(*args, **kwargs)
            tensors = [i for i, value in enumerate(args) if _is_differentiable(value)]
            marked = _Mark.apply(self, stage, True, *(args[i] for i in tensors))
            inputs = list(args)
            for i, value in zip(tensors, marked, strict=True):
                inputs[i] = value
            return self._closed(stage, function(*inputs, **kwargs))

        return timed

    def _closed(self, stage: str, result: Any) -> Any:
        """The result behind the second mark."""
        values = list(result) if isinstance(result, tuple) else [result]
        places = [i for i, value in enumerate(values) if _is_differentiable(value)]
        marked = _Mark.apply(self, stage, False, *(values[i] for i in places))
        for i, value in zip(places, marked, strict=True):
            values[i] = value
        if not isinstance(result, tuple):
            return values[0]
        return type(result)(*values) if hasattr(result, "_fields") else tuple(values)

    def begin(self, stage: str) -> None:
        """A stage begins now."""
        self._open[stage].append(self._now())

    def end(self, stage: str) -> None:
        """The stage that began last ends now."""
        if self._open[stage]:  # a backward of which only a part is asked for may lack its beginning
            self._spans[stage].append((self._open[stage].pop(), self._now()))

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class _Mark(torch.autograd.Function):
    """Where a stage begins or ends; in the backward, which passes in the other direction, the other of the two."""

    @staticmethod
    def forward(
        ctx: Any, clock: StageClock, stage: str, begins: bool, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.clock, ctx.stage, ctx.begins = clock, stage, begins
        ctx.set_materialize_grads(False)
        (clock.begin if begins else clock.end)(stage)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        (ctx.clock.end if ctx.begins else ctx.clock.begin)(ctx.stage)
        return (None, None, None, *gradients)


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
