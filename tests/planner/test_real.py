"""Plans of real rollouts: valid everywhere, and the counts that the planner promises."""

import numpy as np
import pytest
from shared_data import SHAPE_NAMES, shape_trees

from harts_hf.forest import concatenate_trees
from harts_hf.planner import PlannerConfig, plan_window

SMALL = ("lats_webshop", "vmcts_dafny_bst", "anyswe_a", "nemo_qwen3think_b_drop")


@pytest.mark.parametrize(
    "execution", ["replay", *(pytest.param(one, marks=pytest.mark.exhaustive) for one in ("nested", "keep"))]
)
@pytest.mark.parametrize("name", SHAPE_NAMES)
def test_plans_validate(name, execution):
    """Every set at 8,192 rows on 1 and 2 ranks; the benchmark sweeps all budgets and ranks."""
    trees = list(shape_trees(name))
    for world_size in (1, 2):
        config = PlannerConfig(max_tokens_per_microbatch=8192, world_size=world_size, execution=execution)
        plan_window(trees, config).validate()


@pytest.mark.parametrize("name", SMALL)
def test_plans_validate_at_small_and_large_budgets(name):
    """Small sets at 1,024 and 65,536 rows on 7 ranks, in all executions."""
    trees = list(shape_trees(name))
    for budget in (1024, 65_536):
        for execution in ("replay", "nested", "keep"):
            config = PlannerConfig(max_tokens_per_microbatch=budget, world_size=7, execution=execution)
            plan_window(trees, config).validate()


@pytest.mark.parametrize("name", SHAPE_NAMES)
def test_one_rank_computes_every_row_once(name):
    """sharing="always": forward and backward rows are the unique tokens; replay is that of the uncut tree nearly."""
    tree = concatenate_trees(shape_trees(name))
    for budget in (8192, 16_384):
        schedule = plan_window(tree, PlannerConfig(max_tokens_per_microbatch=budget, sharing="always"))
        schedule.validate()
        assert schedule.forward_tokens == schedule.backward_tokens == tree.num_tokens
        assert len(schedule.microbatches) <= tree.num_tokens / budget * 1.01 + 1
    if name == "miniswe_b_drop":
        assert round(schedule.replay_tokens / tree.num_tokens, 2) == 0.04
    if name == "tot_game24":
        assert round(schedule.replay_tokens / tree.num_tokens, 1) == 1.0


@pytest.mark.parametrize("name", SHAPE_NAMES)
def test_nested_with_half_the_longest_path(name):
    """With room for the graphs of half the longest path: every row backward once, forward at most twice."""
    tree = concatenate_trees(shape_trees(name))
    limit = int(tree.trajectory_lengths.max()) // 2
    config = PlannerConfig(max_graph_tokens=limit, execution="nested", sharing="always")
    schedule = plan_window(tree, config)
    schedule.validate()
    assert schedule.peak_graph_tokens <= limit
    assert schedule.backward_tokens == tree.num_tokens
    assert schedule.forward_tokens <= 2 * tree.num_tokens


@pytest.mark.parametrize("name", ["tau_airline_b", "miniswe_b_drop"])
def test_always_on_eight_ranks(name):
    """All groups on 8 ranks with sharing="always": every row once, even where the longest tree then binds; otherwise
    (tau_airline_b) at most 1.05 of an eighth of one rank's time."""
    tree = concatenate_trees(shape_trees(name))
    schedule = plan_window(tree, PlannerConfig(world_size=8, sharing="always"))
    schedule.validate()
    assert schedule.forward_tokens == tree.num_tokens
    one = plan_window(tree, PlannerConfig(sharing="always"))
    longest = max(plan_window(group, PlannerConfig()).estimated_seconds for group in shape_trees(name))
    assert schedule.estimated_seconds <= 1.05 * max(one.estimated_seconds / 8, longest)


def test_auto_on_a_set_that_shares_little():
    """anyswe_a (ratio 1.04): never slower by the model than no sharing, at any budget and number of ranks tried."""
    trees = list(shape_trees("anyswe_a"))
    for budget in (8192, 65_536):
        for world_size in (1, 2, 7):
            settings = {"max_tokens_per_microbatch": budget, "world_size": world_size}
            auto = plan_window(trees, PlannerConfig(**settings))
            never = plan_window(trees, PlannerConfig(**settings, sharing="never"))
            assert auto.estimated_seconds <= never.estimated_seconds
            assert np.isfinite(auto.estimated_seconds)
