"""Orders of ops: the three executions, limits of memory, equal strings over ranks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harts_hf.planner import CostModel, PlannerConfig, plan_window
from harts_hf.planner.execution import DUMMY, align, interleave
from harts_hf.tree import RolloutTree

BASE = RolloutTree.from_shape([-1, 0, 0, 1, 1], [10, 9, 8, 7, 6], [2, 3, 4])


def base_schedule(**changes):
    """Two ranks, several trunks."""
    config = {"max_tokens_per_microbatch": 8, "chunk_size": 4, "world_size": 2, "sharing": "always", **changes}
    return plan_window(BASE, PlannerConfig(**config))


@st.composite
def words(draw):
    """A nested word of S, F and B with ids."""
    ops, opened, count = [], [], 0
    for _ in range(draw(st.integers(0, 12))):
        choice = draw(st.sampled_from("SFB"))
        if choice == "B" and opened:
            ops.append(("B", opened.pop()))
        elif choice != "B":
            ops.append((choice, count))
            if choice == "F":
                opened.append(count)
            count += 1
    return ops + [("B", index) for index in reversed(opened)]


@given(st.lists(words(), min_size=1, max_size=4))
def test_aligned_strings_are_equal(rank_ops):
    """All ranks run one string, keep their own order, and each backward runs beside those its forward ran beside.

    A rank that knows the kinds of the others' ops alone finds the same.
    """
    aligned = align(rank_ops)
    kinds = [[(kind, 0) for kind, _ in ops] for ops in rank_ops]
    for rank, (own, ops) in enumerate(zip(rank_ops, aligned, strict=True)):
        assert [op for op in ops if op[1] != DUMMY] == own
        assert align([*kinds[:rank], own, *kinds[rank + 1 :]])[rank] == ops
    opened = []
    for ops in zip(*aligned, strict=True):
        (kind,) = {kind for kind, _ in ops}
        together = [index for _, index in ops]
        if kind == "F":
            opened.append(together)
        elif kind == "B":
            assert opened.pop() == together
    assert not opened


def test_graphs_that_do_not_nest_are_not_aligned():
    """Backwards of such words could not stay beside those of their forwards."""
    with pytest.raises(ValueError, match=r"expected backward 1, of the last open graph, got \[\('B', 0\)\]"):
        align([[("F", 0), ("F", 1), ("B", 0), ("B", 1)]])


@given(st.lists(words(), min_size=1, max_size=4), st.integers(1, 10))
def test_interleaved_words_stay_nested(rank_ops, limit):
    """Every rank runs the same ops, forwards in the same order, graphs still nest, and the limit is not passed."""
    # Ids are made unique over ranks; an id under S is taken for a dropped trunk's and is not run by F in these words.
    unique = [[(kind, 100 * rank + index) for kind, index in ops] for rank, ops in enumerate(rank_ops)]
    rows = [1] * (100 * len(rank_ops))
    before = max(max(depths(ops), default=0) for ops in unique)
    for own, ops in zip(unique, interleave(unique, rows, limit), strict=True):
        assert sorted(ops) == sorted(own)
        assert [op for op in ops if op[0] != "B"] == [op for op in own if op[0] != "B"]
        assert max(depths(ops), default=0) <= max(limit, before)
        stack = []
        for kind, index in ops:
            if kind == "F":
                stack.append(index)
            elif kind == "B":
                assert stack.pop() == index


def depths(ops):
    """Open graphs at each op of a word."""
    return np.cumsum([{"S": 0, "F": 1, "B": -1}[kind] for kind, _ in ops]).tolist()


def test_replay_string_is_that_of_the_design():
    """S^n (F B)^n with equal n on all ranks."""
    schedule = base_schedule(world_size=2, execution="replay")
    string = "".join(kind for kind, _ in schedule.ops(0))
    count = max(sum(m.rank == rank for m in schedule.microbatches) for rank in range(2))
    assert string == "S" * count + "FB" * count
    with pytest.raises(ValueError, match=r"rank in \[0, 2\), got 2"):
        schedule.ops(2)


def test_executions_by_hand():
    """One trunk and two dependents: the strings of docs/windows.md."""
    tree = RolloutTree.from_shape([-1, 0, 0], [8, 8, 8], [1, 2])
    strings = {}
    for execution in ("replay", "nested", "keep"):
        config = PlannerConfig(max_tokens_per_microbatch=8, chunk_size=4, sharing="always", execution=execution)
        schedule = plan_window(tree, config)
        schedule.validate()
        assert [m.trunks for m in schedule.microbatches] == [(), (0,), (0,)]
        assert [m.prefix.tolist() for m in schedule.microbatches] == [[], list(range(8)), list(range(8))]
        strings[execution] = " ".join(f"{kind}{index}" for kind, index in schedule.ops())
        assert schedule.scoring_tokens == (24 if execution == "replay" else 0)
        assert schedule.handoff_tokens == 16 and schedule.peak_handoff_tokens == 8
        assert schedule.peak_graph_tokens == {"replay": 8, "nested": 16, "keep": 24}[execution]
    assert strings == {
        "replay": "S0 S1 S2 F2 B2 F1 B1 F0 B0",
        "nested": "F0 F1 B1 F2 B2 B0",
        "keep": "F0 F1 F2 B2 B1 B0",
    }


@pytest.mark.parametrize(("limit", "dropped"), [(8, True), (15, True), (16, False)])
def test_nested_drops_graphs_that_do_not_fit(limit, dropped):
    """A trunk whose graph may not stay is forwarded without it, and again for its backward; its rows count twice."""
    tree = RolloutTree.from_shape([-1, 0, 0], [8, 8, 8], [1, 2])
    config = PlannerConfig(
        max_tokens_per_microbatch=8, chunk_size=4, sharing="always", execution="nested", max_graph_tokens=limit
    )
    schedule = plan_window(tree, config)
    schedule.validate()
    ops = " ".join(f"{kind}{index}" for kind, index in schedule.ops())
    assert ops == ("S0 F1 B1 F2 B2 F0 B0" if dropped else "F0 F1 B1 F2 B2 B0")
    assert schedule.forward_tokens == (32 if dropped else 24) and schedule.backward_tokens == 24
    assert schedule.peak_graph_tokens == (8 if dropped else 16)


def test_replay_makes_handoff_again_under_a_limit():
    """Two spines: with room for one spine's states only, the first one's are dropped after scoring and made again."""
    tree = RolloutTree.from_shape([-1, 0, 0, -1, 3, 3], [8] * 6, [1, 2, 4, 5])
    cost = CostModel(handoff_bytes_per_row=1, handoff_bytes_per_state=0, gradient_part_of_row=0)
    config = {"max_tokens_per_microbatch": 8, "chunk_size": 4, "sharing": "always", "cost": cost}
    free = plan_window(tree, PlannerConfig(**config))
    tight = plan_window(tree, PlannerConfig(**config, max_handoff_bytes=8))
    for schedule in (free, tight):
        schedule.validate()
    assert free.peak_handoff_bytes == 16 and free.forward_tokens == 48
    assert tight.peak_handoff_bytes == 8 and tight.forward_tokens == 56
    with pytest.raises(ValueError, match="the smallest that works with these settings is max_handoff_bytes=8"):
        plan_window(tree, PlannerConfig(**config, max_handoff_bytes=7))


def test_smallest_limit_is_that_of_the_neediest_rank():
    """Two ranks that need different bytes: the error names what both can work with."""
    tree = RolloutTree.from_shape([-1, 0, 0, 0, 0, 1], [1, 1, 4, 1, 1, 1], [2, 3, 4, 5])
    cost = CostModel(handoff_bytes_per_row=1, handoff_bytes_per_state=10)
    config = {"max_tokens_per_microbatch": 4, "world_size": 2, "chunk_size": 4, "cost": cost}
    with pytest.raises(ValueError, match="the smallest that works") as caught:
        plan_window(tree, PlannerConfig(**config, max_handoff_bytes=0))
    smallest = int(str(caught.value).rsplit("=", 1)[1])
    plan_window(tree, PlannerConfig(**config, max_handoff_bytes=smallest)).validate()
