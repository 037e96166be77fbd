"""Proves that a schedule computes what it should, in a legal order (NumPy only)."""

from collections.abc import Sequence

import numpy as np

from harts_hf.planner.accounting import spans_by_trunk
from harts_hf.planner.config import Execution
from harts_hf.planner.execution import DUMMY, OPENED, Op
from harts_hf.planner.lives import Life
from harts_hf.planner.microbatch import Microbatch
from harts_hf.planner.spans import contains, expand_ranges, intersect, span_size
from harts_hf.tree import IntArray, RolloutTree


def check_microbatches(tree: RolloutTree, microbatches: Sequence[Microbatch]) -> None:
    """Every row of the tree is owned exactly once, and every microbatch is right.

    Raises:
        AssertionError: an invariant is broken.
    """
    for index, microbatch in enumerate(microbatches):
        assert microbatch.id == index, "an id that is not the index"
        for spans in (microbatch.row_spans, microbatch.owned_spans, microbatch.prefix_spans):
            assert (spans[:, 1] > spans[:, 0]).all() and (spans[1:, 0] > spans[:-1, 1]).all(), "spans that touch"
            assert not len(spans) or (spans[0, 0] >= 0 and spans[-1, 1] <= tree.num_tokens), "a row outside the tree"
    spans = np.concatenate([microbatch.owned_spans for microbatch in microbatches])
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    assert len(spans) and spans[0, 0] == 0 and spans[-1, 1] == tree.num_tokens, "a row without an owner"
    assert (spans[1:, 0] == spans[:-1, 1]).all(), "a row with two owners, or none"
    ranks = np.array([microbatch.rank for microbatch in microbatches])
    for microbatch in microbatches:
        _check_microbatch(tree, microbatch, microbatches, ranks)


def _check_microbatch(
    tree: RolloutTree, microbatch: Microbatch, microbatches: Sequence[Microbatch], ranks: IntArray
) -> None:
    """Its rows and prefix are disjoint, closed under parent, and each prefix row is held by exactly one trunk."""
    rows, prefix = microbatch.row_spans, microbatch.prefix_spans
    assert microbatch.num_rows > 0, "an empty microbatch"
    owned = microbatch.owned_spans
    assert span_size(intersect(owned, rows)[1]) == span_size(owned), "owned, not run"
    assert span_size(intersect(rows, prefix)[1]) == 0, "a row both computed and read"
    for spans in (rows, prefix):
        above = tree.parent[_first_rows(tree, spans)]
        above = above[above >= 0]
        assert (contains(rows, above) | contains(prefix, above)).all(), "a row whose parent is missing"
    trunks = microbatch.trunk_ids
    assert len(trunks) == 0 or (trunks[0] >= 0 and trunks[-1] < microbatch.id), "a trunk that is not before"
    assert (np.diff(trunks) > 0).all(), "trunks out of order"
    assert (ranks[trunks] == microbatch.rank).all(), "a trunk elsewhere"
    held = 0
    if len(trunks):
        holder, parts = spans_by_trunk(microbatch, microbatches)
        assert np.array_equal(np.unique(holder), trunks), "a trunk of which nothing is read"
        held = span_size(parts)
        # As many rows as the prefix has, none of them twice.
        parts = parts[np.argsort(parts[:, 0], kind="stable")]
        assert (parts[1:, 0] >= parts[:-1, 1]).all(), "a prefix row that two trunks hold"
    assert held == microbatch.num_prefix, "a prefix row that no trunk holds"


def _first_rows(tree: RolloutTree, spans: IntArray) -> IntArray:
    """Rows of spans whose parent is not simply the row before within the same span."""
    low, high = np.searchsorted(tree.segment_starts, spans[:, 0]), np.searchsorted(tree.segment_starts, spans[:, 1])
    return np.concatenate([spans[:, 0], tree.segment_starts[expand_ranges(low, high)[1]]])


def check_ops(rank_ops: Sequence[Sequence[Op]], microbatches: Sequence[Microbatch], execution: Execution) -> None:
    """Every rank runs its own microbatches in an order of the execution.

    Raises:
        AssertionError: an invariant is broken.
    """
    own: list[list[int]] = [[] for _ in rank_ops]
    for microbatch in microbatches:
        assert 0 <= microbatch.rank < len(own), "a rank that there is not"
        own[microbatch.rank].append(microbatch.id)
    for ids, ops in zip(own, rank_ops, strict=True):
        _check_counts(ids, ops, execution)
        _check_order(ops, microbatches)
        _check_shape(len(ids), ops, execution)


def _check_counts(own: Sequence[int], ops: Sequence[Op], execution: Execution) -> None:
    """Exactly one F and one B of each of the rank's microbatches; one scoring S in replay, none in keep."""
    counts = {(kind, index): 0 for kind in OPENED for index in own}
    for op in ops:
        assert op in counts, "an op of another rank's microbatch"
        counts[op] += 1
    for index in own:
        assert counts["F", index] == counts["B", index] == 1, "a microbatch without exactly one F and one B"
        scored = counts["S", index]
        assert {"replay": scored >= 1, "nested": scored <= 1, "keep": scored == 0}[execution], "S count"


def _check_order(ops: Sequence[Op], microbatches: Sequence[Microbatch]) -> None:
    """Every op comes after a forward of each of its trunks, a B after its F and before the B of its trunks."""
    made, ended = np.zeros(len(microbatches), bool), np.zeros(len(microbatches), bool)
    graphs = set()
    for kind, index in ops:
        trunks = microbatches[index].trunk_ids
        assert made[trunks].all(), "states that no forward made"
        if kind == "B":
            assert index in graphs, "a backward without a graph"
            assert not ended[trunks].any(), "a backward after its trunk's"
            ended[index] = True
        else:
            made[index] = True
            if kind == "F":
                graphs.add(index)


def check_lives(ops: Sequence[Op], lives: Sequence[Life], microbatches: Sequence[Microbatch]) -> None:
    """Handed states are there whenever an op reads them, and gradients put there live until the trunk's backward.

    Args:
        ops: of a rank, as :func:`check_ops` accepts them.
        lives: when each trunk's states are alive.
        microbatches: by id.

    Raises:
        AssertionError: an invariant is broken.
    """
    begins: dict[int, list[Life]] = {}
    for life in lives:
        begins.setdefault(life[1], []).append(life)
        assert ops[life[1]][1] == life[0] and ops[life[1]][0] != "B", "states that no forward made"
    forward, backward, first, last, made = (np.full(len(microbatches), -1) for _ in range(5))
    for time, (kind, index) in enumerate(ops):
        if kind == "B":
            backward[index] = time
    for time, (kind, index) in enumerate(ops):
        trunks = microbatches[index].trunk_ids
        assert ((first[trunks] >= 0) & (time <= last[trunks])).all(), "states that are not there"
        if kind == "F":
            forward[index] = time
        elif kind == "B":
            assert (last[trunks] == backward[trunks]).all(), "gradients freed before the trunk's backward"
            assert (made[trunks] < forward[index]).all(), "states made again between a forward and its backward"
        if kind != "B":
            made[index] = time
        for trunk, begin, end in begins.get(time, ()):
            assert last[trunk] < begin, "states of a trunk that are alive twice"
            first[trunk], last[trunk] = begin, end


def _check_shape(count: int, ops: Sequence[Op], execution: Execution) -> None:
    """Replay: every F is followed by its B, after the scoring pass. Keep: every F before every B, reversed."""
    if execution == "replay":
        scoring = [index for kind, index in ops[:count] if kind == "S"]
        assert len(scoring) == len(set(scoring)) == count, "scoring pass"
        for time, (kind, index) in enumerate(ops):
            assert kind != "F" or ops[time + 1] == ("B", index), "an F without its B next"
    elif execution == "keep":
        forwards = [index for kind, index in ops if kind == "F"]
        assert list(ops) == [("F", i) for i in forwards] + [("B", i) for i in reversed(forwards)], "order of keep"
    else:
        stack: list[int] = []
        for kind, index in ops:
            if kind == "F":
                stack.append(index)
            elif kind == "B":
                assert stack and stack.pop() == index, "graphs that do not nest"


def check_alignment(rank_ops: Sequence[Sequence[Op]], aligned: Sequence[Sequence[Op]]) -> None:
    """With dummies all ranks run equal strings, each B beside those its F ran beside; without them nothing is lost.

    Raises:
        AssertionError: an invariant is broken.
    """
    assert len({"".join(kind for kind, _ in ops) for ops in aligned}) == 1, "ranks with different strings"
    for own, ops in zip(rank_ops, aligned, strict=True):
        assert [op for op in ops if op[1] != DUMMY] == list(own), "ops lost by the alignment"
        opened: list[int] = []
        for kind, index in ops:
            if kind == "F":
                opened.append(index)
            elif kind == "B":
                assert opened and opened.pop() == index, "a B that is not of the last open graph, as on all ranks"
        assert not opened, "a graph that is left open"
