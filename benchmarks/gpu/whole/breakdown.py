"""What an optimizer step's time goes to, from a profiler's events: kernels by kind, launches, waits, gaps."""

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

# Name of the range that a step's forwards and backwards run in, as the profiler shows it.
INSIDE = "harts.forward_backward"

# Kinds of kernels in the order in which names are tried; what nothing matches is "other".
KINDS = {
    "attention": r"flash|fmha|FlashAttention|flex_attention|sdpa|_fill_by|_classify|_extremes|_ends_of_block|_finish",
    "rule": r"chunk_|kda|gated_delta|recompute_w_u|prepare_wy|l2norm|_states_(for|back)ward|_sum_children|^_(un)?pack",
    "convolution": r"^_forward$|^_backward_(pre|x|x_heavy)$",
    "gather": r"^_take$|^_sum_positions$",
    "fused": r"^_?fused_|^_statistics$|^_gradient$|^_route",
    "grouped products": r"GroupProblemShape|grouped_mm|prepare_grouped",
    "products": r"nvjet|gemm|cutlass|cublas|splitK|gemv",
    "top-k and sort": r"topk|TopK|[rR]adix|[sS]ort|bitonic|DeviceScan|unique|[hH]istogram|searchsorted",
    "optimizer": r"multi_tensor_apply|foreach",
    "copies": r"Memcpy|Memset|direct_copy|CatArray|bfloat16_copy|float16_copy|copy_kernel|FillFunctor",
    "gather and scatter": r"index|[gG]ather|[sS]catter|Embedding|embedding|flip",
    "reductions": r"reduce|[sS]oftMax|softmax|LogSumExp|norm",
    "elementwise": r"elementwise|Functor|pointwise|triton_",
}
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")  # for the device waits whoever times it
COPIES = ("cudaMemcpyAsync", "cudaMemcpy")
_PATTERNS = {kind: re.compile(pattern) for kind, pattern in KINDS.items()}


class Event(NamedTuple):
    """``on_device`` for kernels, copies and fills; else a call of the runtime, or a range. Times in nanoseconds."""

    name: str
    on_device: bool
    start: int
    duration: int


def kind_of(name: str) -> str:
    """Of a kernel, by its name."""
    return next((kind for kind, pattern in _PATTERNS.items() if pattern.search(name)), "other")


def events_of(profile: Any) -> list[Event]:
    """Of a ``torch.profiler.profile`` that has ended."""
    from torch.autograd import DeviceType

    return [
        Event(event.name(), event.device_type() == DeviceType.CUDA, event.start_ns(), event.duration_ns())
        for event in profile.profiler.kineto_results.events()
    ]


def breakdown(events: Iterable[Event]) -> dict[str, Any]:
    """Milliseconds, counts and shares of one step.

    Returns:
        ``kernels_ms`` by kind; ``kernel_ms``; ``span_ms`` from the first kernel's start to the last's end and
        ``idle_ms``, in which no kernel ran; ``launches``; ``synchronisations`` and ``copies``, each with those within
        :data:`INSIDE` beside (``_inside``); ``largest``, the ten kernels that took longest, ``other`` names.
    """
    by_kind: dict[str, float] = defaultdict(float)
    by_name: dict[str, list[float]] = defaultdict(list)
    device: list[Event] = []
    calls: list[Event] = []
    ranges: list[tuple[int, int]] = []
    for event in events:
        if event.name == INSIDE:
            if not event.on_device:  # the range shows on the device, too, as long as its kernels
                ranges.append((event.start, event.start + event.duration))
        elif event.on_device and event.name.startswith("Optimizer."):
            continue  # a range of PyTorch's, as long as its kernels
        elif event.on_device:
            device.append(event)
            by_name[event.name].append(event.duration / 1e6)
        else:
            calls.append(event)
    for name, times in by_name.items():
        by_kind[kind_of(name)] += sum(times)

    def inside(event: Event) -> bool:
        return any(start <= event.start < end for start, end in ranges)

    waits = [event for event in calls if event.name in WAITS]
    copies = [event for event in calls if event.name in COPIES]
    launches = [event for event in calls if "Launch" in event.name]
    span, busy = _span_and_busy(device)
    totals = {name: sum(times) for name, times in by_name.items()}
    largest = sorted(totals, key=lambda name: -totals[name])
    return {
        "kernels_ms": {kind: round(by_kind[kind], 3) for kind in [*KINDS, "other"] if by_kind[kind]},
        "kernel_ms": sum(by_kind.values()),
        "span_ms": span / 1e6,
        "idle_ms": (span - busy) / 1e6,
        "launches": len(launches),
        "launches_inside": sum(map(inside, launches)),
        "synchronisations": len(waits),
        "synchronisations_inside": sum(map(inside, waits)),
        "copies": len(copies),
        "copies_inside": sum(map(inside, copies)),
        "largest": {name[:160]: [len(by_name[name]), round(totals[name], 3)] for name in largest[:40]},
        "other": {n[:120]: round(totals[n], 3) for n in largest if kind_of(n) == "other"},
    }


def _span_and_busy(device: list[Event]) -> tuple[int, int]:
    if not device:
        return 0, 0
    ordered = sorted((event.start, event.start + event.duration) for event in device)
    busy, until = 0, ordered[0][0]
    for start, end in ordered:
        busy += max(0, end - max(start, until))
        until = max(until, end)
    return until - ordered[0][0], busy
