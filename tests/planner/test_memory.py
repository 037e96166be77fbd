"""Counts of what is alive while each op runs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import shapes

from harts_hf.planner import CostModel, PlannerConfig, plan_window
from harts_hf.planner.memory import handed_bytes
from harts_hf.tree import RolloutTree

COST = CostModel(
    handoff_bytes_per_row=3, handoff_bytes_per_state=20, gradient_part_of_row=2 / 3, gradient_part_of_state=1 / 2
)


def plan(execution, tree=None, **limits):
    """A trunk of 8 rows with two dependents of 8, chunks of 4, or another tree."""
    tree = tree or RolloutTree.from_shape([-1, 0, 0], [8, 8, 8], [1, 2])
    config = PlannerConfig(
        max_tokens_per_microbatch=8, chunk_size=4, sharing="always", execution=execution, cost=COST, **limits
    )
    return plan_window(tree, config)


def test_replay_by_hand():
    """S0 S1 S2 F2 B2 F1 B1 F0 B0: values end with the last reader, gradient sums begin with the first backward."""
    counts = plan("replay").memory_counts()
    assert counts.graph_rows.tolist() == [0, 0, 0, 8, 8, 8, 8, 8, 8]
    assert counts.graph_chunks.tolist() == [0, 0, 0, 2, 2, 2, 2, 2, 2]
    assert counts.graph_prefix_rows.tolist() == [0, 0, 0, 8, 8, 8, 8, 0, 0]
    assert counts.value_rows.tolist() == [8] * 7 + [0, 0]
    assert counts.value_states.tolist() == [1] * 7 + [0, 0]
    assert counts.gradient_rows.tolist() == [0] * 4 + [8] * 5
    assert counts.gradient_states.tolist() == [0] * 4 + [1] * 5
    assert counts.scoring_rows.tolist() == [8] * 3 + [0] * 6
    assert counts.backward_rows.tolist() == [0, 0, 0, 0, 8, 0, 8, 0, 8]
    assert counts.backward_prefix_rows.tolist() == [0, 0, 0, 0, 8, 0, 8, 0, 0]


def test_nested_by_hand():
    """F0 F1 B1 F2 B2 B0: a dependent's graph stands on the trunk's."""
    counts = plan("nested").memory_counts()
    assert counts.graph_rows.tolist() == [8, 16, 16, 16, 16, 8]
    assert counts.value_rows.tolist() == [8] * 5 + [0]
    assert counts.gradient_rows.tolist() == [0, 0, 8, 8, 8, 8]


def test_bytes_count_values_and_gradients_while_they_live():
    """8 rows of 1 + 2 bytes and a state of 10 + 10: values alone, then both, then gradients alone."""
    schedule = plan("replay")
    alive = handed_bytes(schedule.ops(), schedule.microbatches, schedule.handed)
    assert alive.tolist() == schedule.memory_counts().handed_bytes.tolist() == [18] * 4 + [44] * 3 + [26] * 2
    assert schedule.peak_handoff_bytes == 44


def test_a_limit_that_gradients_alone_would_break():
    """Two spines: all values fit at once and no gradients are alive then, so that nothing is made again."""
    tree = RolloutTree.from_shape([-1, 0, 0, -1, 3, 3], [8] * 6, [1, 2, 4, 5])
    schedule = plan("replay", tree, max_handoff_bytes=18 + 44)
    schedule.validate()
    assert schedule.forward_tokens == schedule.tree.num_tokens
    assert schedule.peak_handoff_bytes == 18 + 44
    assert plan("replay", tree, max_handoff_bytes=44).forward_tokens > schedule.tree.num_tokens


def test_peak_is_the_largest_sum_and_not_the_sum_of_peaks():
    """Graphs and scoring are never alive together."""
    counts = plan("replay").memory_counts()
    assert counts.peak_bytes({"graph_rows": 10, "scoring_rows": 7}) == 80
    assert counts.peak_bytes({"graph_rows": 10, "gradient_rows": 1, "value_rows": 2}) == 80 + 8 + 16
    assert counts.table().shape == (9, len(counts.names()))
    with pytest.raises(ValueError, match=r"expected counts among graph_rows, .*, got rows"):
        counts.peak_bytes({"rows": 1})


def test_ranks_are_checked():
    """Counts are those of one rank."""
    with pytest.raises(ValueError, match=r"rank in \[0, 1\), got 1"):
        plan("replay").memory_counts(1)


@settings(max_examples=40)
@given(
    shape=shapes(max_nodes=10, max_length=14),
    budget=st.sampled_from([4, 5, 8, 16]),
    execution=st.sampled_from(["replay", "nested", "keep"]),
    limit=st.sampled_from([None, 60, 200]),
    world_size=st.integers(1, 2),
)
def test_counts_equal_brute_force(shape, budget, execution, limit, world_size):
    """Every count of every op, from the string of ops alone."""
    config = PlannerConfig(
        max_tokens_per_microbatch=budget,
        chunk_size=4,
        sharing="always",
        execution=execution,
        max_handoff_bytes=limit,
        world_size=world_size,
        cost=COST,
    )
    try:
        schedule = plan_window(RolloutTree.from_shape(*shape), config)
    except ValueError as error:
        assert "max_handoff_bytes" in str(error)
        return
    microbatches, exports = schedule.microbatches, schedule.handed
    peaks = []
    for rank in range(world_size):
        counts, ops = schedule.memory_counts(rank), schedule.ops(rank, dummies=False)
        for place, (kind, index) in enumerate(ops):
            done, ahead = ops[:place], ops[place:]
            graphs = [m for m in microbatches if ("F", m.id) in [*done, ops[place]] and ("B", m.id) in ahead]
            assert counts.graph_rows[place] == sum(m.num_rows for m in graphs)
            assert counts.graph_chunks[place] == sum(schedule.measures[m.id].chunks for m in graphs)
            assert counts.graph_prefix_rows[place] == sum(m.num_prefix for m in graphs)
            values = [trunk for trunk in exports if is_kept(ops, place, trunk, microbatches)]
            sums = [trunk for trunk in exports if has_sum(ops, place, trunk, microbatches)]
            assert counts.value_rows[place] == sum(exports[trunk].rows for trunk in values)
            assert counts.value_states[place] == sum(exports[trunk].states for trunk in values)
            assert counts.gradient_rows[place] == sum(exports[trunk].rows for trunk in sums)
            assert counts.gradient_states[place] == sum(exports[trunk].states for trunk in sums)
            assert counts.scoring_rows[place] == (microbatches[index].num_rows if kind == "S" else 0)
            assert counts.backward_rows[place] == (microbatches[index].num_rows if kind == "B" else 0)
            assert counts.backward_prefix_rows[place] == (microbatches[index].num_prefix if kind == "B" else 0)
            in_bytes = sum(exports[trunk].value_bytes for trunk in values)
            peaks.append(in_bytes + sum(exports[trunk].gradient_bytes for trunk in sums))
            assert counts.handed_bytes[place] == peaks[-1]
    assert schedule.peak_handoff_bytes == max(peaks)


def is_kept(ops, place, trunk, microbatches):
    """Whether somebody still reads what the trunk's latest forward up to here has made."""
    made = [time for time, op in enumerate(ops[: place + 1]) if op in (("S", trunk), ("F", trunk))]
    if not made:
        return False
    again = [time for time in range(place + 1, len(ops)) if ops[time] in (("S", trunk), ("F", trunk))]
    end = again[0] if again else len(ops)
    return any(trunk in microbatches[index].trunks for _, index in ops[max(place, made[-1] + 1) : end])


def has_sum(ops, place, trunk, microbatches):
    """Whether a dependent's backward has begun and the trunk's has not ended."""
    begun = any(kind == "B" and trunk in microbatches[index].trunks for kind, index in ops[: place + 1])
    return begun and ("B", trunk) in ops[place:]
