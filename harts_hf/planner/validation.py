"""Proves that a schedule computes what it should, in a legal order, within its limits (NumPy only)."""

from typing import TYPE_CHECKING

import numpy as np

from harts_hf.planner.accounting import contains, intersect
from harts_hf.planner.execution import DUMMY, Op
from harts_hf.planner.microbatch import Microbatch, span_size
from harts_hf.tree import IntArray

if TYPE_CHECKING:
    from harts_hf.planner.schedule import Schedule


def validate_schedule(schedule: "Schedule") -> None:
    """Proves every invariant.

    Raises:
        AssertionError: an invariant is broken.
    """
    _check_rows(schedule)
    for microbatch in schedule.microbatches:
        _check_microbatch(schedule, microbatch)
    assert len(schedule.rank_ops) == schedule.config.world_size
    for rank, ops in enumerate(schedule.rank_ops):
        _check_counts(schedule, rank, ops)
        _check_order(schedule, rank, ops)
        _check_shape(schedule, rank, ops)
    _check_strings(schedule)
    _check_limits(schedule)


def _check_rows(schedule: "Schedule") -> None:
    """Every row of the tree is owned exactly once."""
    spans = np.concatenate([microbatch.owned_spans for microbatch in schedule.microbatches])
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    assert (spans[:, 1] > spans[:, 0]).all(), "an empty span of owned rows"
    assert spans[0, 0] == 0 and spans[-1, 1] == schedule.tree.num_tokens, "a row without an owner"
    assert (spans[1:, 0] == spans[:-1, 1]).all(), "a row with two owners, or none"


def _check_microbatch(schedule: "Schedule", microbatch: Microbatch) -> None:
    """Its rows and prefix are disjoint, closed under parent, and each prefix row is held by exactly one trunk."""
    all_microbatches = schedule.microbatches
    assert all_microbatches[microbatch.id] is microbatch, "an id that is not the place"
    rows, prefix = microbatch.row_spans, microbatch.prefix_spans
    for spans in (rows, microbatch.owned_spans, prefix):
        assert (spans[:, 1] > spans[:, 0]).all() and (spans[1:, 0] > spans[:-1, 1]).all(), "spans that touch"
    assert microbatch.num_rows > 0, "an empty microbatch"
    assert span_size(intersect(microbatch.owned_spans, rows)) == span_size(microbatch.owned_spans), "owned, not run"
    assert span_size(intersect(rows, prefix)) == 0, "a row both computed and read"
    for spans in (rows, prefix):
        above = schedule.tree.parent[_first_rows(schedule, spans)]
        above = above[above >= 0]
        assert (contains(rows, above) | contains(prefix, above)).all(), "a row whose parent is missing"
    held = 0
    for trunk in microbatch.trunks:
        assert trunk < microbatch.id and all_microbatches[trunk].rank == microbatch.rank, "a trunk elsewhere or later"
        part = span_size(intersect(prefix, all_microbatches[trunk].row_spans))
        assert part > 0, "a trunk of which nothing is read"
        held += part
    assert held == microbatch.num_prefix, "a prefix row that no trunk holds, or two do"
    for outer, inner in zip(microbatch.trunks, microbatch.trunks[1:], strict=False):
        assert outer < inner, "trunks out of order"


def _first_rows(schedule: "Schedule", spans: IntArray) -> IntArray:
    """Rows of spans whose parent is not simply the row before within the same span."""
    pieces = [spans[:, 0]]
    jumps = schedule.tree.segment_starts
    pieces.append(jumps[contains(spans, jumps)])
    return np.concatenate(pieces)


def _check_counts(schedule: "Schedule", rank: int, ops: tuple[Op, ...]) -> None:
    """Exactly one F and one B of each of the rank's microbatches; one scoring S in replay, none in keep."""
    own = [microbatch.id for microbatch in schedule.microbatches if microbatch.rank == rank]
    counts = {(kind, index): 0 for kind in "SFB" for index in own}
    for op in ops:
        assert op in counts, "an op of another rank's microbatch"
        counts[op] += 1
    for index in own:
        assert counts["F", index] == counts["B", index] == 1, "a microbatch without exactly one F and one B"
        scored = counts["S", index]
        assert {"replay": scored >= 1, "nested": scored <= 1, "keep": scored == 0}[schedule.execution], "S count"


def _check_order(schedule: "Schedule", rank: int, ops: tuple[Op, ...]) -> None:
    """Forwards find their trunks' states; backwards come before those of their trunks and find their own graph."""
    place = {op: time for time, op in reversed(list(enumerate(ops)))}  # first time of each op
    alive: dict[int, list[tuple[int, int]]] = {trunk: [] for trunk in schedule.exports.of}
    for trunk, first, last in schedule.handoff_lives[rank]:
        alive[trunk].append((first, last))
        assert ops[first][1] == trunk and ops[first][0] in "SF", "states that no forward made"
    for time, (kind, index) in enumerate(ops):
        for trunk in schedule.microbatches[index].trunks:
            lives = [life for life in alive[trunk] if life[0] < time <= life[1]]
            assert len(lives) == 1, "states that are not there"
            if kind == "B":
                assert place["B", trunk] > time, "a backward after its trunk's"
                assert lives[0][1] == place["B", trunk], "gradients freed before the trunk's backward"
                made = place["F", index]
                assert lives[0][0] < made, "states made again between a forward and its backward"
        if kind == "B":
            assert place["F", index] < time, "a backward without a graph"


def _check_shape(schedule: "Schedule", rank: int, ops: tuple[Op, ...]) -> None:
    """Replay: every F is followed by its B, after the scoring pass. Keep: every F before every B, reversed."""
    if schedule.execution == "replay":
        count = sum(microbatch.rank == rank for microbatch in schedule.microbatches)
        assert all(kind == "S" for kind, _ in ops[:count]) and len({i for _, i in ops[:count]}) == count, (
            "scoring pass"
        )
        for time, (kind, index) in enumerate(ops):
            assert kind != "F" or ops[time + 1] == ("B", index), "an F without its B next"
    elif schedule.execution == "keep":
        forwards = [index for kind, index in ops if kind == "F"]
        assert list(ops) == [("F", i) for i in forwards] + [("B", i) for i in reversed(forwards)], "order of keep"
    else:
        stack: list[int] = []
        for kind, index in ops:
            if kind == "F":
                stack.append(index)
            elif kind == "B":
                assert stack and stack.pop() == index, "graphs that do not nest"


def _check_strings(schedule: "Schedule") -> None:
    """With dummies all ranks run equal strings; a dummy B follows a dummy F; without them nothing is lost."""
    strings = set()
    for rank in range(schedule.config.world_size):
        ops = schedule.ops(rank)
        strings.add("".join(kind for kind, _ in ops))
        assert tuple(op for op in ops if op[1] != DUMMY) == schedule.rank_ops[rank], "ops lost by the alignment"
        open_dummies = 0
        for kind, index in ops:
            if index == DUMMY:
                open_dummies += {"S": 0, "F": 1, "B": -1}[kind]
                assert open_dummies >= 0, "a dummy B without a dummy F"
        assert open_dummies == 0, "a dummy F without a dummy B"
    assert len(strings) == 1, "ranks with different strings"


def _check_limits(schedule: "Schedule") -> None:
    """Limits hold; only single paths computed whole may exceed the budgets of rows."""
    config = schedule.config
    for index in schedule.oversized:
        microbatch = schedule.microbatches[index]
        leaves = schedule.tree.subtree_end[microbatch.rows] == microbatch.rows + 1
        assert leaves.sum() == 1 and microbatch.num_prefix == 0, "over the budget without need"
    if config.max_graph_tokens is not None:
        assert schedule.peak_graph_tokens <= config.max_graph_tokens, "too many graphs alive"
    if config.max_handoff_bytes is not None:
        assert schedule.peak_handoff_bytes <= config.max_handoff_bytes, "too many bytes handed over"
    assert config.sharing != "never" or (schedule.tree.occurrence_counts == 1).all(), "shared although told not to"
