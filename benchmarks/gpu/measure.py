"""Timing, memory and launches of GPU code."""

import statistics
from collections.abc import Callable

import torch


def median_ms(run: Callable[[], object], repeats: int = 7, warmups: int = 2) -> float:
    """Median of CUDA-event times.

    Everything is queued without waiting in between, as in a training step: what Python takes to launch a run counts
    only where it is longer than what the GPU has to do.
    """
    for _ in range(warmups):
        run()
    return statistics.median(_queue(run, repeats))


def steady_ms(run: Callable[[], object], seconds: float = 1.0) -> float:
    """As :func:`median_ms`, for so long, after half as long: a GPU at its limit of power takes that time to settle.

    Runs that take turns do not settle: the one after the heaviest is measured at the lowest clock.
    """
    run()
    (once,) = _queue(run, 1)
    repeats = max(3, min(200, round(1e3 * seconds / once)))
    return median_ms(run, repeats, repeats // 2)


def _queue(run: Callable[[], object], repeats: int) -> list[float]:
    events = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def peak_bytes(run: Callable[[], object]) -> int:
    """Most memory that ``run`` held above what was allocated before it, when it is run for a second time."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def kernels(run: Callable[[], object]) -> list[tuple[str, int, float]]:
    """(name, launches, milliseconds) of each kernel of one run, slowest first."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    rows = [
        (event.key, event.count, event.self_device_time_total / 1e3)
        for event in profile.key_averages()
        if event.self_device_time_total > 0
    ]
    return sorted(rows, key=lambda row: -row[2])
