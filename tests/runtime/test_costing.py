"""Fitting the planner's cost model to a model: every op is timed, bytes are seen, the file can be planned with."""

import json

import numpy as np
import pytest
from support.models import tiny_model

from harts_hf.cli.main import main
from harts_hf.forest import random_tokens
from harts_hf.planner import CostModel, PlannerConfig, plan_window
from harts_hf.planner.cost import FEATURES
from harts_hf.runtime import costing
from harts_hf.tree import RolloutTree


@pytest.mark.exhaustive
def test_fit_on_a_tiny_model(tmp_path, monkeypatch):
    """Coefficients are finite and not negative, some time is explained, and the saved file is used by `harts plan`."""
    windows = [
        ("chain", costing._chain(192), 64),
        ("short", ([-1, -1], [96, 96], [0, 1]), 256),
        ("spine", costing._spine(312), 128),
        ("bushy", costing._bushy(960), 256),
    ]
    monkeypatch.setattr(costing, "_windows", lambda max_rows: iter(windows))
    seen = []
    cost = costing.fit_cost_model(
        tiny_model("qwen3_5_text"), max_rows=256, source="a test", repeats=1, progress=seen.append
    )
    assert len(seen) == len(windows) and cost.source == "a test"
    for coefficients in (cost.forward, cost.backward):
        values = np.array([getattr(coefficients, name) for name in FEATURES])
        assert np.isfinite(values).all() and (values >= 0).all() and values.max() > 0
    assert cost.handoff_bytes_per_row > 0 and cost.handoff_bytes_per_state > 0
    cost.save(tmp_path / "cost.json")
    assert CostModel.load(tmp_path / "cost.json") == cost
    rollouts = tmp_path / "rollouts.jsonl"
    rollouts.write_text(json.dumps({"group": "a", "token_ids": [1, 2, 3]}) + "\n")
    assert main(["plan", str(rollouts), "--cost", str(tmp_path / "cost.json")]) == 0
    plan_window(RolloutTree.from_trajectories([[1, 2]]), PlannerConfig(cost=cost)).validate()


@pytest.mark.parametrize("shape", [costing._chain(100), costing._spine(1000), costing._bushy(2000)])
def test_shapes_are_legal(shape):
    """Windows of the fit are trees, and random tokens keep their siblings apart."""
    tree = RolloutTree.from_shape(*shape)
    tokens = random_tokens(tree, 64, np.random.default_rng(0))
    again = RolloutTree.from_trajectories([tokens[tree.path(index)] for index in range(tree.num_trajectories)])
    assert again.num_tokens == tree.num_tokens


def test_too_few_rows():
    """Windows under 256 rows would time overhead only."""
    with pytest.raises(ValueError, match="max_rows of at least 256"):
        costing.fit_cost_model(tiny_model("qwen3_5_text"), max_rows=100, source="")
