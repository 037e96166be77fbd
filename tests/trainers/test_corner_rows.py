"""Rows that merging trajectories could lose or count wrongly: three SGD steps equal stock TRL's all the same."""

import numpy as np
import pytest
import torch
from support import recorded
from support.trainer_runs import assert_same_training, run_trainer
from trl import GRPOConfig, GRPOTrainer

from harts_hf import RolloutTree, TreeGRPOConfig, TreeGRPOTrainer
from harts_hf.trainers.rows import PaddedRows

OPTIONS = {
    # A rollout that ends inside another, and one that equals another.
    "ends-and-duplicates": {"rollout_func": recorded.rollout_func_with_ends},
    "ends-and-duplicates-off-policy": {
        "rollout_func": recorded.rollout_func_with_ends,
        "num_iterations": 2,
        "epsilon": 0.01,
        "learning_rate": 0.5,
    },
    # The last of three optimizer steps has 2 slices instead of 5.
    "short-last-step": {
        "max_steps": -1,
        "num_train_epochs": 1,
        "gradient_accumulation_steps": 5,
        "steps_per_generation": 2,
    },
    # Tokens that the clip leaves without a gradient of their log-prob still have one of their entropy.
    "entropy-of-clipped-tokens": {"entropy_coef": 0.2, "num_iterations": 2, "epsilon": 1e-3, "learning_rate": 0.2},
}


@pytest.mark.essential("ends-and-duplicates")
@pytest.mark.parametrize("name", OPTIONS)
def test_corner_rows(name, tmp_path):
    """TreeGRPOTrainer trains as GRPOTrainer does."""
    options = {"max_steps": 3, **OPTIONS[name]}
    stock = run_trainer(GRPOTrainer, GRPOConfig, tmp_path / "stock", **options)
    tree = run_trainer(TreeGRPOTrainer, TreeGRPOConfig, tmp_path / "tree", tree_sharing="always", **options)
    assert_same_training(stock, tree)
    assert tree[2].state.global_step == 3


def test_the_rollouts_have_the_corners():
    """The recorded groups hold an interior end and a duplicate, with rewards of their own."""
    rows = recorded.rollouts_of("p0")
    trainer = type("T", (), {"num_generations": 4, "model": type("M", (), {"training": True})})
    output = recorded.rollout_func_with_ends(["p0"] * 4, trainer)
    tree = RolloutTree.from_trajectories(
        [np.array(p + c) for p, c in zip(output["prompt_ids"], output["completion_ids"], strict=True)]
    )
    assert (tree.num_children[tree.end_rows] > 0).sum() == 1
    assert len(set(tree.end_rows.tolist())) == 3
    assert len(set(rows["recorded_reward"])) == 4


def test_where_tokens_of_padded_rows_lie():
    """Tokens and rows of the tree by columns: padding before prompts, behind completions, and within both."""
    masks = torch.tensor([[0, 1, 1, 1, 1, 0], [1, 0, 1, 0, 1, 1], [1, 1, 0, 1, 0, 1], [1, 1, 1, 0, 0, 0]])
    rows = PaddedRows.from_tensors(torch.arange(24).reshape(4, 6), masks, 3)
    paths = [np.arange(len(tokens)) + 10 * number for number, tokens in enumerate(rows.trajectories())]
    assert [tokens.tolist() for tokens in rows.trajectories()] == [[1, 2, 3, 4], [6, 8, 10, 11], [12, 13, 15, 17]]
    assert rows.index(paths)["log_prob"].tolist() == [[2, 3, -1], [-1, 12, 13], [22, -1, 23], [-1, -1, -1]]
