"""Planning, proving and batching do work that grows with the forest and the answer, not with their squares.

Work is counted, not timed: calls of functions (Python's and C's), and elements that NumPy calls are given.
"""

import sys
from collections.abc import Callable

import numpy as np
import pytest

from harts_hf.batch.handoff import demands, exports, imports
from harts_hf.planner import PlannerConfig, Schedule, plan_window
from harts_hf.tree import RolloutTree

# Four times the size may take this many times the calls: sorted searches and doubling lists add a little.
AT_MOST = 4.6


def caterpillar(forks: int) -> RolloutTree:
    """A spine of three rows between forks of two rows each."""
    parent, length, ends, spine = [-1], [3], [], 0
    for _ in range(forks):
        parent += [spine, spine]
        length += [2, 3]
        ends.append(len(parent) - 2)
        spine = len(parent) - 1
    return RolloutTree.from_shape(parent, length, [*ends, spine])


def path(rows: int) -> RolloutTree:
    """One trajectory."""
    return RolloutTree.from_shape([-1], [rows], [0])


def calls_of(work: Callable[[], object]) -> int:
    """Calls of Python and C functions that ``work`` makes."""
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def everything_asked(schedule: Schedule) -> None:
    """Proof, counts and text."""
    schedule.validate()
    schedule.memory_counts()
    assert schedule.peak_handoff_bytes >= 0 and schedule.peak_handoff_tokens >= 0 and schedule.estimated_seconds > 0
    str(schedule)


def handed(schedule: Schedule) -> None:
    """What microbatches read from one another, as tensors."""
    tree, microbatches = schedule.tree, schedule.microbatches
    needed = [demands(tree, microbatch, schedule.config.chunk_size) for microbatch in microbatches]
    exported = exports(needed, microbatches)
    for microbatch, need in zip(microbatches, needed, strict=True):
        imports(microbatch, need, exported)


CASES = {
    "path": (path, 2_000, {"max_tokens_per_microbatch": 64}),
    "path in keep": (path, 2_000, {"max_tokens_per_microbatch": 64, "execution": "keep"}),
    "path in nested": (path, 2_000, {"max_tokens_per_microbatch": 64, "execution": "nested"}),
    "path with few graphs": (
        path,
        2_000,
        {"max_tokens_per_microbatch": 64, "execution": "nested", "max_graph_tokens": 640},
    ),
    "caterpillar": (caterpillar, 500, {"max_tokens_per_microbatch": 512}),
    "caterpillar in one microbatch": (caterpillar, 700, {}),
    "caterpillar at default settings": (caterpillar, 4_000, {}),
    "caterpillar on two ranks": (caterpillar, 300, {"max_tokens_per_microbatch": 512, "world_size": 2}),
    "caterpillar on 16 ranks": (caterpillar, 300, {"max_tokens_per_microbatch": 512, "world_size": 16}),
    "caterpillar with few bytes": (
        caterpillar,
        300,
        {"max_tokens_per_microbatch": 256, "sharing": "always", "max_handoff_bytes": 10**12},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_calls_grow_with_the_forest(name):
    """Planning four times the forest takes about four times the calls."""
    shape, size, settings = CASES[name]
    small, large = shape(size), shape(4 * size)
    config = PlannerConfig(**settings)
    plan_window(shape(10), config)
    calls = [calls_of(lambda tree=tree: plan_window(tree, config)) for tree in (small, large)]
    assert calls[1] <= AT_MOST * calls[0], calls


@pytest.mark.parametrize("name", ["path", "path in nested", "caterpillar"])
def test_calls_of_proof_and_counts_grow_with_the_forest(name):
    """The same of validate() and of everything that a schedule can be asked."""
    shape, size, settings = CASES[name]
    schedules = [plan_window(shape(n), PlannerConfig(**settings, cost=None)) for n in (size, 4 * size)]
    calls = [calls_of(lambda schedule=schedule: everything_asked(schedule)) for schedule in schedules]
    assert calls[1] <= AT_MOST * calls[0], calls


def test_searches_of_the_proof_grow_with_the_spans(monkeypatch):
    """validate() searches as many values as rows stand in spans and prefixes, and not all segments per microbatch."""
    searched = 0
    original = np.searchsorted

    def searchsorted(array, values, *args, **options):
        nonlocal searched
        searched += np.size(values)
        return original(array, values, *args, **options)

    for budget in (4_096, 256):  # few and many microbatches
        schedule = plan_window(caterpillar(2_000), PlannerConfig(max_tokens_per_microbatch=budget, sharing="always"))
        spans = sum(len(m.row_spans) + len(m.prefix_spans) for m in schedule.microbatches)
        searched = 0
        monkeypatch.setattr(np, "searchsorted", searchsorted)
        schedule.validate()
        monkeypatch.undo()
        assert searched <= 20 * (spans + len(schedule.tree.segment_starts)), (budget, searched, spans)


def test_calls_of_handed_tables_grow_with_microbatches():
    """Tables of what is handed: a few calls per microbatch, and one per trunk that it reads."""
    schedules = [plan_window(path(n), PlannerConfig(max_tokens_per_microbatch=64)) for n in (1_000, 4_000)]
    trunks = [sum(len(m.trunks) for m in schedule.microbatches) for schedule in schedules]
    calls = [calls_of(lambda schedule=schedule: handed(schedule)) for schedule in schedules]
    per_microbatch = calls[0] / len(schedules[0].microbatches)
    assert calls[1] <= 1.5 * per_microbatch * len(schedules[1].microbatches) + 16 * trunks[1], (calls, trunks)
