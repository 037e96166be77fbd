"""Two SGD steps of TreeGRPOTrainer against stock GRPOTrainer; the budget is in support.trainer_runs."""

import pytest
from support.trainer_runs import assert_same_training, run_trainer
from trl import GRPOConfig, GRPOTrainer

from harts_hf import TreeGRPOConfig, TreeGRPOTrainer


@pytest.mark.essential("1-bailing_hybrid")
@pytest.mark.parametrize("family", ["bailing_hybrid", "qwen3_5_text"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_default_loss(family, accumulation, tmp_path):
    """Parameters and metrics equal stock TRL's, with and without gradient accumulation."""
    options = {"gradient_accumulation_steps": accumulation, "family": family}
    stock = run_trainer(GRPOTrainer, GRPOConfig, tmp_path / "stock", **options)
    tree = run_trainer(TreeGRPOTrainer, TreeGRPOConfig, tmp_path / "tree", tree_sharing="always", **options)
    assert_same_training(stock, tree, family=family)
    for log in tree[1][:-1]:
        assert log["tree/sharing_ratio"] > 1.3
        assert log["tree/forward_tokens"] * log["tree/sharing_ratio"] == pytest.approx(log["tree/expanded_tokens"])
        assert log["tree/logp_recompute_maxdiff"] < 1e-9
