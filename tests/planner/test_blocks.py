"""Nested words of several ranks: blocks of whole trees, trunks that are run once more, bars on recorded shapes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared_data import below_one_root, shape_trees
from strategies import shapes
from support.schedules import cut_schedule

from harts_hf.forest import concatenate_trees
from harts_hf.planner import PlannerConfig, blocks, plan_window
from harts_hf.planner.choosing import plan_step
from harts_hf.planner.execution import block_ops
from harts_hf.planner.validation import check_ops
from harts_hf.tree import RolloutTree


def fewest_again(own, most, limit, seconds):
    """Of all ways to divide microbatches into runs: the fewest seconds of trunks that a later run reads."""
    trunks = {one.id: set(one.trunks) for one in own}

    def again(first, stop):
        """Those of a run, what they read themselves of it, what that reads, and so on."""
        inside, later = own[first:stop], own[stop:]
        found = {one.id for one in inside if any(one.id in trunks[other.id] for other in later)}
        for one in reversed(inside):
            found |= trunks[one.id] & {other.id for other in inside} if one.id in found else set()
        return found

    best = [0.0]
    for stop in range(1, len(own) + 1):
        runs = [first for first in range(max(stop - most, 0), stop)
                if first == stop - 1 or sum(one.num_rows for one in own[first:stop]) <= limit]  # fmt: skip
        best.append(min(best[first] + sum(seconds[index] for index in again(first, stop)) for first in runs))
    return best[-1]


@given(shapes(max_nodes=10, max_length=14), st.integers(1, 3), st.integers(8, 40))
def test_blocks_run_as_little_as_possible_again(shape, most, limit):
    """Legal nested words, at most so many graphs and rows open, and the fewest seconds of ``S`` that runs can have."""
    config = PlannerConfig(max_tokens_per_microbatch=8, chunk_size=4, execution="nested", sharing="always")
    schedule = plan_window(RolloutTree.from_shape(*shape), config)
    own = schedule.microbatches
    seconds = [schedule.op_seconds(("S", one.id)) for one in own]
    ops = block_ops(own, most, limit, seconds)
    check_ops([ops], own, "nested")
    graphs, rows = 0, 0
    for kind, index in ops:
        graphs += {"S": 0, "F": 1, "B": -1}[kind]
        rows += {"S": 0, "F": 1, "B": -1}[kind] * own[index].num_rows
        assert graphs <= most and (rows <= limit or graphs == 1)
    scored = sum(seconds[index] for kind, index in ops if kind == "S")
    assert scored == pytest.approx(fewest_again(own, most, limit, seconds))
    assert [kind for kind, _ in ops].count("S") == 0 or ops[0][0] == "S"


def test_trunks_of_trunks_of_a_block():
    """Of a run of three only the last is read later; it reads the second, that the first, and nobody else does."""
    own = cut_schedule(RolloutTree.from_shape([-1, -1, -1], [12, 8, 8], [0, 1, 2]), [8, 16, 24], "nested").microbatches
    assert [one.trunks for one in own] == [(), (0,), (1,), (2,)]
    seconds = [5.0, 1.0, 1.0, 1.0]  # leaving out the first would look best
    ops = block_ops(own, 3, 28, seconds)
    check_ops([ops], own, "nested")
    assert sum(seconds[index] for kind, index in ops if kind == "S") == fewest_again(own, 3, 28, seconds) == 5


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 9)), min_size=2, max_size=7), st.data())
def test_what_an_exchange_wins(sides, data):
    """The difference of the sum over places of the slowest, counted anew."""
    place, load = np.array([place for place, _ in sides]), np.array([seconds for _, seconds in sides])
    fixed = np.array(data.draw(st.lists(st.floats(0, 9), min_size=3, max_size=3)))
    first = data.draw(st.integers(0, len(load) - 1))
    other = data.draw(st.integers(0, len(load) - 1).filter(lambda one: one != first))
    changed = load.copy()
    changed[[first, other]] = data.draw(st.lists(st.floats(0, 9), min_size=2, max_size=2))

    def all_together(seconds):
        return sum(max([fixed[number], *seconds[place == number]]) for number in np.unique(place))

    won = blocks._Sides.of(place, load, fixed).won(
        np.array([first]), np.array([other]), changed[[first]], changed[[other]]
    )
    assert won[0] == pytest.approx(all_together(load) - all_together(changed), abs=1e-9)


@pytest.mark.parametrize(
    ("name", "ranks", "common", "least"),
    [
        # Measured: 0.994, 0.99, 0.98 and 0.93, 0.836, 0.91; without blocks 0.94, 0.82, 0.90 and 0.79, 0.77, 0.81.
        ("tau_airline_b", 2, False, 0.98), ("tau_airline_b", 4, False, 0.97), ("tau_airline_b", 8, False, 0.96),
        # One tree of 20 takes nearly a rank of four, and its deep end stands alone.
        ("miniswe_b_drop", 2, False, 0.92), ("miniswe_b_drop", 4, False, 0.83), ("miniswe_b_drop", 8, False, 0.90),
        # One number of ranks is enough of trees below one root.
        ("tau_airline_b", 2, True, 0.96), ("miniswe_b_drop", 2, True, 0.90),
    ],
)  # fmt: skip
def test_nested_ranks_beside_one(name, ranks, common, least):
    """An on-policy step whose rows of graphs are limited: most of what one rank over so many, or its longest path,
    does; trees below one root as well as apart."""
    tree = below_one_root(shape_trees(name), 1) if common else concatenate_trees(shape_trees(name))
    config = PlannerConfig(max_tokens_per_microbatch=32_768)
    longest = RolloutTree.from_shape([-1], [int(tree.trajectory_lengths.max())], [0])
    one, path = (plan_step(of, config, can_skip_scoring=True).estimated_seconds for of in (tree, longest))
    schedule = plan_step(tree, replace(config, world_size=ranks), can_skip_scoring=True)
    schedule.validate()
    assert schedule.execution == "nested"
    assert least <= max(one / ranks, path) / schedule.estimated_seconds <= 1.05
