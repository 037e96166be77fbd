"""Schedules: every plan is proven, counts equal brute force, JSON, determinism."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import shapes

from harts_hf.planner import CostModel, Microbatch, PlannerConfig, Schedule, decompose_chains, plan_window, refine
from harts_hf.planner.cost import UnitSeconds
from harts_hf.planner.spans import rows_of_spans
from harts_hf.tree import RolloutTree

CHUNK = 4


@st.composite
def trees(draw):
    """Forests with segments of up to a few chunks of 4."""
    parent, length, sample_node = draw(shapes(max_nodes=10, max_length=14))
    return RolloutTree.from_shape(parent, length, sample_node)


@st.composite
def configs(draw):
    """Everything that can be asked for, with small limits."""
    return PlannerConfig(
        max_tokens_per_microbatch=draw(st.sampled_from([4, 5, 7, 8, 16, 33, 1000])),
        max_linear_rows=draw(st.sampled_from([None, 4, 9, 30])),
        world_size=draw(st.integers(1, 4)),
        chunk_size=CHUNK,
        sharing=draw(st.sampled_from(["auto", "always", "never"])),
        execution=draw(st.sampled_from(["auto", "replay", "nested", "keep"])),
        cost=draw(st.sampled_from([None, CostModel(handoff_bytes_per_row=1, handoff_bytes_per_state=10)])),
    )


@settings(max_examples=30)
@given(trees(), configs(), st.booleans())
def test_one_microbatch_is_planned_without_a_search(tree, config, handoff):
    """What fits into one microbatch gets the plan that the search over walks and cuts ends with."""
    config = replace(config, max_tokens_per_microbatch=1000, max_graph_tokens=1000, world_size=1, handoff=handoff)
    found = plan_window(tree, config)
    with mock.patch.object(refine, "build_whole", lambda task: None):
        searched = plan_window(tree, config)
    assert found.to_json() == searched.to_json() and str(found) == str(searched)
    assert found.estimated_seconds == searched.estimated_seconds


@settings(max_examples=50)
@given(trees(), configs())
def test_every_plan_is_valid(tree, config):
    """All invariants hold for any forest and any choice, and nothing is computed twice on one rank."""
    schedule = plan_window(tree, config)
    schedule.validate()
    assert str(schedule).startswith("Schedule: ")
    if config.sharing == "always":
        assert schedule.forward_tokens == schedule.backward_tokens == tree.num_tokens
    if config.sharing == "never":
        # A piece of a long trajectory may compute a short prefix again instead of reading a state.
        assert schedule.tree.num_tokens == tree.num_expanded_tokens <= schedule.backward_tokens
    for index in range(tree.num_trajectories):
        path = tree.path(index)
        planned = schedule.tree.path(index)
        assert schedule.tree.depth[planned].tolist() == tree.depth[path].tolist()


@pytest.mark.exhaustive
@settings(max_examples=50)
@given(trees(), configs(), st.data())
def test_limits_hold_or_the_smallest_that_works_is_named(tree, config, data):
    """Under limits of memory a plan keeps them; if none is found, the limits named in the error work."""
    limits = {
        "max_graph_tokens": data.draw(st.integers(CHUNK, 60)),
        "max_handoff_bytes": data.draw(st.integers(0, 60)),
    }
    for name in data.draw(st.sampled_from([[], *([name] for name in limits)])):
        del limits[name]
    values = {**vars(config), **limits, "cost": CostModel(handoff_bytes_per_row=1, handoff_bytes_per_state=10)}
    try:
        schedule = plan_window(tree, PlannerConfig(**values))
    except ValueError as error:
        before, after = str(error).split(";")
        assert before.startswith("no schedule keeps within ")
        needed = {name: int(value) for name, value in re.findall(r"(max_\w+)=(\d+)", after)}
        assert needed and all(value > limits[name] for name, value in needed.items())
        schedule = plan_window(tree, PlannerConfig(**{**values, **needed}))
    schedule.validate()


def test_limits_that_are_both_too_small_are_both_named():
    """Raising the first alone would only lead to the next error."""
    tree = RolloutTree.from_shape([-1, 0, 0, 1, 1], [40, 20, 9, 30, 30], [2, 3, 4])
    config = {"max_tokens_per_microbatch": 16, "chunk_size": CHUNK, "sharing": "always", "execution": "keep"}
    with pytest.raises(
        ValueError, match=r"max_graph_tokens=8 and max_handoff_bytes=0; .*=129 and max_handoff_bytes=\d+"
    ):
        plan_window(tree, PlannerConfig(**config, max_graph_tokens=8, max_handoff_bytes=0))


@settings(max_examples=40)
@given(trees(), configs())
def test_without_handoff_paths_are_whole(tree, config):
    """handoff=False: no microbatch reads another; only a single path may exceed a budget."""
    values = {**vars(config), "handoff": False}
    schedule = plan_window(tree, PlannerConfig(**values))
    schedule.validate()
    for microbatch in schedule.microbatches:
        assert microbatch.trunks == () and microbatch.num_prefix == 0
        assert not ((schedule.tree.parent[microbatch.rows[0]]) >= 0)


def counts_by_definition(schedule, microbatch):
    """Linear rows, pairs, entries and calls of a microbatch, from the paths of its rows."""
    tree, rows = schedule.tree, set(microbatch.rows.tolist())
    below = {int(tree.parent[row]) for row in rows}
    nodes = {}
    for row in sorted(rows):
        if tree.depth[row] % CHUNK == CHUNK - 1 or row not in below:
            path = tree.path_to(row)
            nodes[row] = path[tree.depth[row] // CHUNK * CHUNK :].tolist()
    above = {end: int(tree.parent[chunk[0]]) for end, chunk in nodes.items()}
    entries = sorted({row for row in above.values() if row >= 0 and row not in rows})
    order = sorted(nodes)
    parent = [order.index(above[end]) if above[end] in rows else -1 for end in order]
    return {
        "linear_rows": sum(map(len, nodes.values())),
        "pairs": sum(int(tree.depth[row]) + 1 for row in rows),
        "entries": entries,
        "chunks": len(nodes),
        "calls": decompose_chains(np.array(parent)).num_calls,
    }


@settings(max_examples=40)
@given(trees(), configs())
def test_counts_equal_brute_force(tree, config):
    """Work of every microbatch, and peaks of every rank, equal a slow count from the definitions."""
    schedule = plan_window(tree, config)
    for microbatch, measured in zip(schedule.microbatches, schedule.measures, strict=True):
        expected = counts_by_definition(schedule, microbatch)
        assert measured.work.rows == len(microbatch.rows)
        assert measured.work.linear_rows == expected["linear_rows"]
        assert measured.work.pairs == expected["pairs"]
        assert measured.entries.tolist() == expected["entries"]
        assert measured.work.calls == expected["calls"]
        assert measured.chunks == expected["chunks"]
    graph_peak = handoff_peak = 0
    for rank in range(config.world_size):
        ops = schedule.ops(rank, dummies=False)
        for time, (_, _) in enumerate(ops):
            graphs = sum(
                microbatch.num_rows
                for microbatch in schedule.microbatches
                if ("F", microbatch.id) in ops[: time + 1] and ("B", microbatch.id) not in ops[:time]
            )
            graph_peak = max(graph_peak, graphs)
            handed = set()
            for trunk, first, last in schedule.handoff_lives[rank]:
                if first <= time <= last:
                    held = set(schedule.microbatches[trunk].rows.tolist())
                    for microbatch in schedule.microbatches:
                        if trunk in microbatch.trunks:
                            handed |= {(trunk, row) for row in held & set(microbatch.prefix.tolist())}
            handoff_peak = max(handoff_peak, len(handed))
    assert schedule.peak_graph_tokens == graph_peak
    assert schedule.peak_handoff_tokens == handoff_peak
    assert schedule.replay_tokens == sum(m.work.linear_rows - m.work.rows for m in schedule.measures)


@settings(max_examples=30)
@given(trees(), configs())
def test_json_round_trip(tree, config):
    """A schedule from JSON is the same, with the tree given or rebuilt from its shape."""
    schedule = plan_window(tree, config)
    text = schedule.to_json()
    for again in (Schedule.from_json(text), Schedule.from_json(text, schedule.tree)):
        again.validate()
        assert again.to_json() == text
        assert again.estimated_seconds == schedule.estimated_seconds
        assert [again.ops(rank) for rank in range(config.world_size)] == [
            schedule.ops(rank) for rank in range(config.world_size)
        ]


def test_json_of_another_kind():
    """Other formats, versions and trees are refused."""
    schedule = plan_window(RolloutTree.from_trajectories([[1, 2, 3]]))
    content = json.loads(schedule.to_json())
    for changed in ({**content, "version": 99}, {**content, "format": "x"}, [1]):
        with pytest.raises(ValueError, match=r"expected a schedule of format 'harts_hf\.schedule', version 1"):
            Schedule.from_json(json.dumps(changed))
    with pytest.raises(ValueError, match="got another shape"):
        Schedule.from_json(schedule.to_json(), RolloutTree.from_trajectories([[1, 2]]))


def test_microbatch_from_rows_and_from_spans():
    """Rows become spans and spans become rows."""
    one = Microbatch(id=3, rows=[1, 2, 5, 6, 7], owned=[False, True, True, True, False], prefix=[0, 4], trunks=(1,))
    assert one.row_spans.tolist() == [[1, 3], [5, 8]] and one.owned_spans.tolist() == [[2, 3], [5, 7]]
    assert one.rows.tolist() == [1, 2, 5, 6, 7] and one.owned.tolist() == [False, True, True, True, False]
    assert one.prefix.tolist() == [0, 4] and one.num_rows == 5 and one.num_prefix == 2
    assert rows_of_spans(one.prefix_spans[:0]).tolist() == []
    with pytest.raises(ValueError, match="ascending rows without repeats"):
        Microbatch(id=0, rows=[2, 1], owned=[True, True])


def test_several_trees_make_one_forest():
    """Rows and trajectories of the first tree come first; small trees share a microbatch."""
    trees = [RolloutTree.from_trajectories([[1, 2, 3], [1, 2, 4]]), RolloutTree.from_trajectories([[1, 2]])]
    schedule = plan_window(trees, PlannerConfig(sharing="always"))
    schedule.validate()
    assert schedule.tree.num_tokens == 6 and schedule.tree.token_ids.tolist() == [1, 2, 3, 4, 1, 2]
    assert [schedule.tree.path(i).tolist() for i in range(3)] == [[0, 1, 2], [0, 1, 3], [4, 5]]
    assert len(schedule.microbatches) == 1
    with pytest.raises(ValueError, match="at least one tree"):
        plan_window([])


def test_never_keeps_tokens_and_numbers():
    """sharing="never": every trajectory has rows of its own, with its tokens, under its number."""
    trajectories = [[1, 2, 3], [1, 2], [1, 2, 3], [7]]
    schedule = plan_window(RolloutTree.from_trajectories(trajectories), PlannerConfig(sharing="never"))
    tree = schedule.tree
    assert [tree.token_ids[tree.path(i)].tolist() for i in range(4)] == trajectories
    assert tree.num_tokens == 9 and (tree.occurrence_counts == 1).all()


SCRIPT = """
import sys
sys.path.insert(0, "tests")
from shared_data import shape_trees
from harts_hf.planner import PlannerConfig, plan_window
config = PlannerConfig(max_tokens_per_microbatch=2048, world_size=3, execution="nested", max_graph_tokens=4096)
sys.stdout.write(plan_window(list(shape_trees("vmcts_dafny_bst")), config).to_json())
"""


@pytest.mark.exhaustive
def test_same_plan_in_every_process():
    """Hash seeds and processes do not change a plan: its JSON is equal byte for byte."""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(outputs) == 1


def test_common_root_of_prompts():
    """A system prompt shared by four prompts, on two ranks: "auto" computes it on both, one of which owns it; "always"
    computes it once, so one rank idles."""
    # Root of 8, four prompts of 40 with two answers of 4 each.
    parent = [-1, *[0] * 4, *[prompt for prompt in range(1, 5) for _ in range(2)]]
    tree = RolloutTree.from_shape(parent, [8, *[40] * 4, *[4] * 8], range(5, 13))
    rows_only = UnitSeconds(rows=1e-6, linear_rows=0, pairs=0, calls=0, handoff_bytes=0, microbatches=0)
    cost = CostModel(forward=rows_only, backward=rows_only)
    config = PlannerConfig(max_tokens_per_microbatch=1000, chunk_size=4, world_size=2, cost=cost)
    schedule = plan_window(tree, config)
    schedule.validate()
    assert [m.num_rows for m in schedule.microbatches] == [8 + 2 * 48] * 2
    assert sum(m.owned[:8].all() for m in schedule.microbatches) == 1
    assert schedule.forward_tokens == tree.num_tokens + 8
    once = plan_window(tree, replace(config, sharing="always"))
    once.validate()
    assert once.forward_tokens == tree.num_tokens
    assert [kind for kind, _ in once.ops(1, dummies=False)] == [] and once.ops(1) == [("S", -1), ("F", -1), ("B", -1)]


def test_always_places_trees_by_their_time():
    """sharing="always" on three ranks: trees of 9, 8, 7, 6, 5 and 4 hundred rows go together as 9 + 4, 8 + 5, 7 + 6,
    each with its forks, and every row of every tree is computed once."""
    trees = []
    for hundreds in (4, 5, 6, 7, 8, 9):
        sizes = [60 * hundreds, 30 * hundreds, 10 * hundreds]
        trees.append(RolloutTree.from_shape([-1, 0, 0], sizes, [1, 2]))
    rows_only = UnitSeconds(rows=1e-6, linear_rows=0, pairs=0, calls=0, handoff_bytes=0, microbatches=0)
    cost = CostModel(forward=rows_only, backward=rows_only)
    schedule = plan_window(trees, PlannerConfig(world_size=3, sharing="always", cost=cost, chunk_size=4))
    schedule.validate()
    assert schedule.forward_tokens == 3900
    assert [sum(m.num_rows for m in schedule.microbatches if m.rank == rank) for rank in range(3)] == [1300] * 3


def test_whole_paths_under_a_limit_of_graphs():
    """Without handoff a path longer than max_graph_tokens has no schedule; the longest path is named."""
    tree = RolloutTree.from_shape([-1, 0, 0], [4, 30, 9], [1, 2])
    config = {"chunk_size": 4, "sharing": "always", "handoff": False}
    with pytest.raises(ValueError, match="smallest that works with these settings is max_graph_tokens=34"):
        plan_window(tree, PlannerConfig(**config, max_graph_tokens=20))
    plan_window(tree, PlannerConfig(**config, max_graph_tokens=34)).validate()
