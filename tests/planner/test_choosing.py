"""Executions that cannot be the fastest are not planned, and the plan is the one that planning them all would give."""

from dataclasses import replace

import numpy as np
import pytest

from harts_hf.planner import (
    PlannerConfig,
    choosing,
    fastest,
    least_seconds,
    plan_step,
    plan_window,
    with_execution_chosen,
)
from harts_hf.tree import RolloutTree


def random_shape(seed: int, num_nodes: int, max_length: int) -> RolloutTree:
    """A tree of shapes without tokens, a sample at every node."""
    rng = np.random.default_rng(seed)
    parents = [-1, *(int(rng.integers(node)) for node in range(1, num_nodes))]
    return RolloutTree.from_shape(parents, rng.integers(1, max_length, num_nodes).tolist(), list(range(num_nodes)))


@pytest.mark.parametrize("execution", ["replay", "nested", "keep"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_no_plan_is_faster_than_the_bound(execution, ranks):
    config = PlannerConfig(max_tokens_per_microbatch=1200, execution=execution, world_size=ranks)
    for seed in range(4):
        tree = random_shape(seed, num_nodes=40, max_length=600)
        seconds = plan_window(tree, config).estimated_seconds
        assert 0 < least_seconds(tree, config) <= seconds
    path = RolloutTree.from_shape([-1], [60_000], [0])
    alone = replace(config, world_size=1, max_tokens_per_microbatch=16384)
    seconds = plan_window(path, alone).estimated_seconds
    assert 0.8 * seconds < least_seconds(path, alone) <= seconds, "too low to spare a plan"


def test_a_step_is_what_planning_all_executions_gives(monkeypatch):
    """With spared plans among them, and with plans of each execution that win."""
    made: list[PlannerConfig] = []

    def noted(tree, config, on_raised):
        made.append(config)
        return plan_window(tree, config)

    monkeypatch.setattr(choosing, "_plan_raised", noted)
    spared, winners = 0, set()
    # Seeds at which a plan is spared, at which both are made, and at which replay wins.
    for seed, num_nodes, max_length, rows, ranks in (
        *((seed, 12, 8000, 16384, 2) for seed in (0, 1, 2)),
        (4, 20, 9000, 4096, 3),
    ):
        tree = random_shape(seed, num_nodes, max_length)
        config = PlannerConfig(max_tokens_per_microbatch=rows, world_size=ranks)
        part = -(-tree.num_tokens // ranks)
        choices = [with_execution_chosen(config, can_skip_scoring=skips, num_rows=part) for skips in (True, False)]
        whole = [plan_window(tree, one) for one in choices]
        made.clear()
        found = plan_step(tree, config, can_skip_scoring=True)
        assert found.digest() == min(whole, key=lambda one: one.estimated_seconds).digest()
        spared += len(made) == 1
        winners.add(found.execution)
    assert 0 < spared < 3 and winners == {"nested", "replay"}, (spared, winners)


def test_the_last_of_equal_plans():
    tree = random_shape(0, num_nodes=5, max_length=30)
    schedule = plan_window(tree, PlannerConfig(execution="nested"))
    free = PlannerConfig(execution="nested", world_size=4096)
    assert fastest(tree, [free, free], lambda number: number, lambda number: schedule) == (1, 1)
