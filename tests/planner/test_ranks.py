"""Schedules of several ranks: the lockstep objective, what placement reaches, trees below one prefix, world counts."""

import numpy as np
import pytest
from exhaustive_plans import fastest_by_search, random_forest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_data import below_one_root, shape_trees
from strategies import shapes

from harts_hf.forest import concatenate_trees
from harts_hf.planner import CostModel, PlannerConfig, count_world, plan_window
from harts_hf.planner.execution import DUMMY
from harts_hf.tree import RolloutTree


def longest_path_alone(tree, config):
    """Estimated seconds of the longest trajectory on a rank of its own."""
    path = RolloutTree.from_shape([-1], [int(tree.trajectory_lengths.max())], [0])
    return plan_window(path, config).estimated_seconds


@pytest.mark.exhaustive
@settings(max_examples=30)
@given(shapes(max_nodes=10, max_length=14), st.integers(2, 4), st.sampled_from(["replay", "nested", "keep"]))
def test_the_estimate_is_the_slowest_op_of_each_slot(shape, world_size, execution):
    """Ranks run equal strings; each slot takes what its slowest op takes, a dummy what a microbatch without rows does;
    the order of the ranks has no part in it."""
    config = PlannerConfig(max_tokens_per_microbatch=8, chunk_size=4, world_size=world_size, execution=execution)
    schedule = plan_window(RolloutTree.from_shape(*shape), config)
    cost, seconds = CostModel(), 0.0
    strings = [schedule.ops(rank) for rank in reversed(range(world_size))]
    for slot in zip(*strings, strict=True):
        assert len({kind for kind, _ in slot}) == 1
        unit = cost.backward if slot[0][0] == "B" else cost.forward
        works = [schedule.measures[index].work for _, index in slot if index != DUMMY]
        seconds += max([unit.seconds(work) for work in works] + [unit.microbatches])
    assert schedule.estimated_seconds == pytest.approx(seconds, rel=1e-12)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("world_size", "segments", "count"), [(2, 7, 12), (3, 5, 25)])
def test_small_forests_against_exhaustive_search(world_size, segments, count):
    """At most 1.02 of the fastest plan there is in the mean, 1.10 at worst (measured on 300: 1.002 and 1.045)."""
    ratios = []
    for seed in range(count):
        tree, budget = random_forest(np.random.default_rng(seed), segments)
        schedule = plan_window(tree, PlannerConfig(max_tokens_per_microbatch=budget, world_size=world_size))
        schedule.validate()
        own = schedule.estimated_seconds
        best = fastest_by_search(tree, budget, CostModel(), own * (1 + 1e-9), world_size)
        ratios.append(own / best)
    assert np.mean(ratios) <= 1.02 and max(ratios) <= 1.10, ratios


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "ranks", "copies", "budget", "least"),
    [
        ("tau_airline_b", 8, 1, 16_384, 0.98),
        ("tau_airline_b", 64, 8, 65_536, 0.97),
        # Forks of the longest path need it again on other ranks: docs/lab-notes.md has the bound of 0.967.
        ("miniswe_b_drop", 8, 1, 65_536, 0.945),
        ("miniswe_b_drop", 64, 8, 65_536, 0.945),
    ],
)
def test_large_forests_against_a_lower_bound(name, ranks, copies, budget, least):
    """No plan is faster than one rank's plan over the ranks, nor than the longest path; ours are nearly as fast."""
    tree = concatenate_trees(list(shape_trees(name)) * copies)
    one = PlannerConfig(max_tokens_per_microbatch=budget)
    schedule = plan_window(tree, PlannerConfig(max_tokens_per_microbatch=budget, world_size=ranks))
    schedule.validate()
    bound = max(plan_window(tree, one).estimated_seconds / ranks, longest_path_alone(tree, one))
    assert least <= bound / schedule.estimated_seconds <= 1


@pytest.mark.parametrize("execution", ["replay", "nested"])
@pytest.mark.parametrize("rows", [0, 1, 400])
def test_two_ranks_share_groups_without_repeating_them(rows, execution):
    """Four groups on two ranks, apart or below a prefix that all share: at least 1.75 times as fast as one rank in the
    same execution, at most 1.02 of the rows."""
    groups = shape_trees("miniswe_b_drop")[:4]
    tree = below_one_root(groups, rows) if rows else concatenate_trees(groups)
    schedule = plan_window(tree, PlannerConfig(world_size=2, execution=execution))
    schedule.validate()
    assert schedule.forward_tokens <= 1.02 * tree.num_tokens
    assert plan_window(tree, PlannerConfig(execution=execution)).estimated_seconds >= 1.75 * schedule.estimated_seconds


@pytest.mark.parametrize("rows", [1, 400])
def test_a_prefix_that_all_share_costs_no_balance(rows):
    """Groups below one root are packed as groups, not cut wherever a rank is full: at least 0.975 of the bound (0.989
    and 0.985 measured, 0.957 and 0.953 where they are cut)."""
    tree = below_one_root(shape_trees("tau_airline_b"), rows)
    bound = plan_window(tree, PlannerConfig()).estimated_seconds / 8
    assert bound >= 0.975 * plan_window(tree, PlannerConfig(world_size=8)).estimated_seconds


@pytest.mark.exhaustive
@settings(max_examples=40)
@given(shapes(max_nodes=12, max_length=14), st.integers(2, 3), st.sampled_from([None, 20, 40]))
def test_nested_ranks_run_one_word_of_brackets(shape, world_size, limit):
    """With dummies every rank runs one string, each B closes the latest open F of its own (a dummy's a dummy's), and
    the rows whose graphs are open keep the limit."""
    tree = RolloutTree.from_shape(*shape)
    longest = int(tree.trajectory_lengths.max())
    config = PlannerConfig(
        max_tokens_per_microbatch=8,
        chunk_size=4,
        world_size=world_size,
        execution="nested",
        max_graph_tokens=limit and max(limit, longest),
    )
    schedule = plan_window(tree, config)
    schedule.validate()
    words = {"".join(kind for kind, _ in schedule.ops(rank)) for rank in range(world_size)}
    assert len(words) == 1
    for rank in range(world_size):
        own, dummies, rows = [], 0, 0
        for kind, index in schedule.ops(rank):
            if kind == "S":
                continue
            if index == DUMMY:
                dummies += 1 if kind == "F" else -1
                assert dummies >= 0
            elif kind == "F":
                own.append(index)
                rows += schedule.microbatches[index].num_rows
                assert limit is None or rows <= config.max_graph_tokens
            else:
                assert own.pop() == index
                rows -= schedule.microbatches[index].num_rows
        assert not own and dummies == 0


def test_executions_of_several_ranks_can_be_compared():
    """Without a limit of graphs the nested plan runs a forward less of the same rows: its estimate says so."""
    groups = list(shape_trees("miniswe_b_drop"))
    for ranks in (2, 8):
        replay, nested = (
            plan_window(groups, PlannerConfig(world_size=ranks, execution=execution))
            for execution in ("replay", "nested")
        )
        assert 1.2 <= replay.estimated_seconds / nested.estimated_seconds <= 1.4
        assert plan_window(groups, PlannerConfig(world_size=ranks)).execution == "replay"


@pytest.mark.exhaustive
@settings(max_examples=40)
@given(shapes(max_nodes=10, max_length=14), st.integers(1, 4), st.booleans())
def test_world_counts_against_sets_of_rows(shape, world_size, handoff):
    """Rows on k ranks are repeated k - 1 times, however often one rank computes them."""
    config = PlannerConfig(max_tokens_per_microbatch=8, chunk_size=4, world_size=world_size, handoff=handoff)
    schedule = plan_window(RolloutTree.from_shape(*shape), config)
    world = count_world(schedule, num_values=2)
    rows = [set() for _ in range(world_size)]
    for microbatch in schedule.microbatches:
        rows[microbatch.rank] |= set(microbatch.rows.tolist())
    tree = schedule.tree
    assert world.repeated_tokens == sum(map(len, rows)) - tree.num_tokens
    assert world.tokens_per_unique == sum(map(len, rows)) / tree.num_tokens
    assert world.idle_ranks == sum(not own for own in rows)
    seconds = [sum(map(schedule.op_seconds, schedule.ops(rank, dummies=False))) for rank in range(world_size)]
    assert world.balance == pytest.approx(np.mean(seconds) / max(seconds))
    strings = [schedule.ops(rank) for rank in range(world_size)]
    assert world.ops == sum(map(len, strings))
    assert world.dummies == sum(index == DUMMY for ops in strings for _, index in ops)
    expected = 8 * (tree.num_expanded_tokens + 4 * tree.num_tokens)
    assert world.exchanged_bytes == (expected if world_size > 1 else 0)


def test_world_counts_refuse_no_values():
    """A loss asks for one value at least."""
    schedule = plan_window(RolloutTree.from_shape([-1], [3], [0]))
    with pytest.raises(ValueError, match="expected num_values of at least 1, got 0"):
        count_world(schedule, num_values=0)


@pytest.mark.exhaustive
def test_text_of_very_many_ranks_is_short():
    """The ops of 64 ranks are listed, the others counted; numbers agree with their nouns."""
    tree = RolloutTree.from_shape([-1], [3], [0])
    text = str(plan_window(tree, PlannerConfig(world_size=4096)))
    assert text.startswith("Schedule: 1 microbatch on 4,096 ranks, replay") and len(text.splitlines()) < 80
    assert text.endswith("... 4,032 more ranks")
    assert str(plan_window(tree)).startswith("Schedule: 1 microbatch on 1 rank, replay")
