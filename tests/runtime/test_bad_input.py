"""tree_logprobs on bad input: a clear error before anything is computed."""

import numpy as np
import pytest
import torch
from support.models import VOCAB, tiny_model

from harts_hf import PlannerConfig, TreeDataCollator, tree_logprobs
from harts_hf.modeling import is_patched


@pytest.fixture(scope="module")
def model():
    """A tiny model."""
    return tiny_model("qwen3_5_text")


@pytest.mark.parametrize(
    ("trajectories", "message"),
    [
        ([], "at least one trajectory, got none"),
        ([[1, 2], []], "trajectory 1 to have at least one token"),
        ([[1, 2], [3, VOCAB]], f"below the vocabulary size {VOCAB}, got {VOCAB} in trajectory 1"),
        ([[1, -2]], "at least 0, got -2"),
        ([[1.0, 2.0]], "integers"),
        ([[[1, 2]]], "1-D"),
    ],
)
def test_trajectories(model, trajectories, message):
    """Empty batches and trajectories, ids outside the vocabulary, other types and shapes."""
    with pytest.raises(ValueError, match=message):
        tree_logprobs(model, trajectories)
    assert not is_patched(model)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf"), None, "1"])
def test_temperature(model, temperature):
    """Temperatures have to be numbers above 0."""
    with pytest.raises(ValueError, match="temperature above 0"):
        tree_logprobs(model, [[1, 2]], temperature=temperature)
    assert not is_patched(model)


def test_planner(model):
    """A dictionary is no configuration."""
    with pytest.raises(ValueError, match="PlannerConfig or None, got dict"):
        tree_logprobs(model, [[1, 2]], planner={"max_tokens_per_microbatch": 64})
    assert not is_patched(model)


def test_budget_below_a_chunk():
    """The message names the smallest budget that works."""
    with pytest.raises(ValueError, match="at least 64"):
        PlannerConfig(max_tokens_per_microbatch=63)


def test_parameters_changed_before_backward():
    """A scheduled backward on other weights would be a wrong gradient: an error."""
    model = tiny_model("qwen3_5_text")
    rows = [np.arange(2, 40), np.arange(3, 47)]
    planner = PlannerConfig(max_tokens_per_microbatch=64)
    log_probs = tree_logprobs(model, rows, planner)
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="changed in place"):
        sum(value.sum() for value in log_probs).backward()


def test_collator_mask_of_another_length():
    """A mask has to match its tokens."""
    with pytest.raises(ValueError, match="attention_mask of trajectory 0"):
        TreeDataCollator()([{"input_ids": [1, 2, 3], "attention_mask": [1, 1]}])


def test_collator_drops_padding():
    """Padding is no token of a trajectory."""
    window = TreeDataCollator()([{"input_ids": [0, 5, 6, 0], "attention_mask": [0, 1, 1, 0]}, [5, 7]])
    assert window.rollout_tree.token_ids.tolist() == [5, 6, 7]
