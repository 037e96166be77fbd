"""The cost model: JSON, fitting, and what is decided by it."""

import json
from dataclasses import replace

import numpy as np
import pytest
from exhaustive_plans import fastest_by_search, random_forest

from harts_hf.planner import CostModel, PlannerConfig, Work, fit_unit_seconds, no_sharing_bound, plan_window
from harts_hf.planner.cost import FEATURES, UnitSeconds
from harts_hf.tree import RolloutTree


def test_seconds_are_linear_in_work():
    """The sum over kinds of work of coefficient times amount; S and F are forwards."""
    cost = CostModel()
    work = Work(rows=10, linear_rows=12, pairs=100, calls=2, handoff_bytes=1000)
    by_hand = sum(getattr(cost.forward, name) * getattr(work, name) for name in FEATURES)
    assert cost.seconds("S", work) == cost.seconds("F", work) == by_hand
    step = cost.step(forwards=2).seconds(work)
    assert step == pytest.approx(2 * by_hand + cost.seconds("B", work), rel=1e-12)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("free", [("forward",), ("backward",), ("forward", "backward")])
def test_rows_that_take_no_time_in_a_direction(free):
    """A fit may find a coefficient of 0: several ranks are planned all the same, without a division by 0."""
    nothing = replace(CostModel().forward, rows=0, linear_rows=0, pairs=0)
    cost = CostModel(**dict.fromkeys(free, nothing))
    for execution in ("nested", "replay", "keep"):
        tree = RolloutTree.from_shape([-1, 0, 0, -1, 3], [30, 9, 5, 8, 9], [1, 2, 4])
        limits = {"max_tokens_per_microbatch": 16, "chunk_size": 4, "world_size": 2}
        plan_window(tree, PlannerConfig(**limits, execution=execution, cost=cost)).validate()


def test_json_round_trip(tmp_path):
    """What is saved is loaded; the file is versioned."""
    cost = CostModel(handoff_bytes_per_row=5.0, source="a test")
    cost.save(tmp_path / "cost.json")
    assert CostModel.load(tmp_path / "cost.json") == cost
    assert json.loads((tmp_path / "cost.json").read_text())["version"] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, "format 'harts_hf.cost', version 2"),
        ({"extra": 1}, "expected the keys"),
        ({"forward": {"rows": 1}}, "expected the coefficients rows, linear_rows"),
        ({"forward": dict.fromkeys(FEATURES, -1.0)}, "at least 0 in forward"),
        ({"handoff_bytes_per_row": -1}, "handoff_bytes_per_row between 0 and 1e.18, got -1"),
        ({"gradient_part_of_state": 1.5}, "gradient_part_of_state between 0 and 1, got 1.5"),
    ],
)
def test_bad_json(change, message):
    """Another version, other keys, missing or negative coefficients."""
    content = {**json.loads(CostModel().to_json()), **change}
    with pytest.raises(ValueError, match=message):
        CostModel.from_json(json.dumps(content))


def random_works(rng, count):
    """Works that differ in every kind."""
    return [
        Work(
            rows=rng.integers(100, 20_000),
            linear_rows=rng.integers(100, 30_000),
            pairs=rng.integers(10**4, 10**9),
            calls=rng.integers(1, 5),
            handoff_bytes=rng.integers(0, 10**9),
        )
        for _ in range(count)
    ]


def test_fit_finds_the_coefficients():
    """From exact times the coefficients come back; with 2 % noise the times are explained within that."""
    rng = np.random.default_rng(0)
    works, truth = random_works(rng, 60), CostModel().backward
    exact = fit_unit_seconds(works, [truth.seconds(work) for work in works])
    for name in FEATURES:
        # Condition of the scaled table is about 30; double rounding leaves far less than 1e-9.
        assert getattr(exact, name) == pytest.approx(getattr(truth, name), rel=1e-6)
    noisy = [truth.seconds(work) * float(rng.normal(1, 0.02)) for work in works]
    fitted = fit_unit_seconds(works, noisy)
    errors = [abs(fitted.seconds(work) / truth.seconds(work) - 1) for work in works]
    assert max(errors) < 0.04  # twice the noise: 60 measurements, 6 coefficients


def test_fit_is_never_negative():
    """Times that fall with the rows leave a coefficient at 0, not below."""
    rng = np.random.default_rng(1)
    works = random_works(rng, 30)
    fitted = fit_unit_seconds(works, [1.0 / work.rows + 1e-9 * work.pairs for work in works])
    assert min(getattr(fitted, name) for name in FEATURES) >= 0 and fitted.rows == 0


@pytest.mark.parametrize(
    ("count", "seconds", "message"), [(3, 1.0, "at least 6 works"), (8, 0.0, "times above 0"), (8, np.inf, "above 0")]
)
def test_bad_measurements(count, seconds, message):
    """Too few works, times that are not positive."""
    works = random_works(np.random.default_rng(0), count)
    with pytest.raises(ValueError, match=message):
        fit_unit_seconds(works, [seconds] * count)


def shared_prefix(prefix, suffixes):
    """Two or more trajectories with a common prefix."""
    parent = [-1] + [0] * len(suffixes)
    return RolloutTree.from_shape(parent, [prefix, *suffixes], range(1, len(parent)))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("suffix", [10, 500, 5_000, 30_000])
def test_auto_is_never_slower_than_no_sharing(suffix, world_size):
    """A 1,000-token prefix shared by two: the estimate is at most that of no sharing, and the reason is said."""
    for budget in (1024, 16_384):
        settings = {"max_tokens_per_microbatch": budget, "world_size": world_size}
        tree = shared_prefix(1000, [suffix, suffix // 2 + 1])
        plans = {s: plan_window(tree, PlannerConfig(**settings, sharing=s)) for s in ("auto", "never", "always")}
        assert plans["auto"].estimated_seconds <= plans["never"].estimated_seconds
        assert "share" in plans["auto"].decision
        bound = no_sharing_bound(tree, PlannerConfig(**settings), "replay")
        assert bound <= plans["never"].estimated_seconds * (1 + 1e-12)


def test_auto_does_not_share_where_calls_are_dear():
    """With a second sequential call dearer than a short prefix, the prefix is computed twice, and that is said."""
    forward = UnitSeconds(rows=1e-6, linear_rows=0, pairs=0, calls=1.0, handoff_bytes=0, microbatches=0)
    cost = CostModel(forward=forward, backward=forward)
    tree = shared_prefix(64, [128, 128])
    schedule = plan_window(tree, PlannerConfig(cost=cost))
    schedule.validate()
    assert schedule.tree.num_tokens == tree.num_expanded_tokens and schedule.linear_calls == 1
    assert schedule.decision.startswith("does not share")
    tree = shared_prefix(640, [128, 128])
    cheap = plan_window(tree, PlannerConfig())
    assert cheap.tree is tree and cheap.decision.startswith("shares")


def test_short_prefix_is_computed_again_where_reading_is_dear():
    """A trunk of a few rows is repeated in each microbatch if handing its state over takes longer."""
    tree = shared_prefix(64, [192, 192, 192])
    dear = CostModel(handoff_bytes_per_state=1e12)
    schedule = plan_window(tree, PlannerConfig(max_tokens_per_microbatch=256, cost=dear))
    schedule.validate()
    assert all(m.num_rows == 256 and not m.trunks for m in schedule.microbatches)
    always = plan_window(tree, PlannerConfig(max_tokens_per_microbatch=256, cost=dear, sharing="always"))
    assert always.forward_tokens == tree.num_tokens


@pytest.mark.exhaustive
def test_close_to_exhaustive_search():
    """On small forests and two ranks the estimate is within 2 % of the best plan on average, 10 % at worst.

    The benchmark runs 300 forests; here are 25 of other seeds.
    """
    cost, ratios = CostModel(), []
    for seed in range(1000, 1025):
        tree, budget = random_forest(np.random.default_rng(seed))
        schedule = plan_window(tree, PlannerConfig(max_tokens_per_microbatch=budget, world_size=2))
        schedule.validate()
        best = fastest_by_search(tree, budget, cost, schedule.estimated_seconds * (1 + 1e-9))
        ratios.append(schedule.estimated_seconds / best)
    assert np.mean(ratios) < 1.02 and max(ratios) < 1.10
