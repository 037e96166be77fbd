"""tree_logprobs against the unpatched model, one trajectory at a time, in float64.

Budget: the stock model differs from itself (a prefix alone against inside a longer sequence) by 2e-14 in log-probs and
gradients in this setting, so 1e-10 and 1e-9 leave four orders for sums in another order and none for a mistake.
"""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from support.models import FAMILIES, VOCAB, tiny_model
from support.oracle import (
    assert_gradients_close,
    float64_everywhere,
    gradients,
    random_weights,
    trajectory_entropy,
    trajectory_log_probs,
)
from support.trees import BRANCH_DEPTHS, branching, random_trajectories, real_trajectories

from harts_hf import PlannerConfig, patch, tree_logprobs, unpatch
from harts_hf.errors import HartsWarning

LOG_PROB_TOLERANCE = 1e-10
GRADIENT_TOLERANCE = 1e-9


def expected_of(model, trajectories, weights, entropy_weights, temperature):
    """Log-probs, entropies and gradients of the stock model."""
    model.zero_grad()
    log_probs, entropies = [], []
    for row, weight, entropy_weight in zip(trajectories, weights, entropy_weights, strict=True):
        log_prob = trajectory_log_probs(model, row, temperature)
        entropy = trajectory_entropy(model, row, temperature)
        ((log_prob * weight).sum() + (entropy * entropy_weight).sum()).backward()
        log_probs.append(log_prob.detach())
        entropies.append(entropy.detach())
    return log_probs, entropies, gradients(model)


def check_parity(model, trajectories, planner=None, temperature=1.0):
    """Log-probs, entropies and every gradient of the tree against the stock model's."""
    weights = random_weights(trajectories, torch.float64, seed=1)
    entropy_weights = random_weights(trajectories, torch.float64, seed=2)
    with float64_everywhere(model):
        expected = expected_of(model, trajectories, weights, entropy_weights, temperature)
        model.zero_grad()
        patch(model)
        log_probs, entropies = tree_logprobs(model, trajectories, planner, temperature, return_entropy=True)
        pairs = [*zip(log_probs, weights, strict=True), *zip(entropies, entropy_weights, strict=True)]
        sum((value * weight).sum() for value, weight in pairs).backward()
        got = gradients(model)
        unpatch(model)
    for values, references in ((log_probs, expected[0]), (entropies, expected[1])):
        for value, reference in zip(values, references, strict=True):
            assert value.dtype == torch.float64
            assert (value - reference).abs().max().item() < LOG_PROB_TOLERANCE if len(reference) else len(value) == 0
    assert_gradients_close(got, expected[2], GRADIENT_TOLERANCE)


@pytest.mark.parametrize("depth", BRANCH_DEPTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_branch_depths(family, depth):
    """A branch around a chunk boundary, with an interior end, a duplicate and a second root."""
    check_parity(tiny_model(family, dtype=torch.float64), branching(depth, vocab=VOCAB))


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("family", FAMILIES)
def test_random_tree(family, checkpointing):
    """Random forks, at a temperature, with and without activation checkpointing."""
    model = tiny_model(family, dtype=torch.float64, seed=3)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    check_parity(model, random_trajectories(5, vocab=VOCAB), temperature=0.7)


@pytest.mark.parametrize("budget", [64, 150])
@pytest.mark.parametrize("family", FAMILIES)
def test_tree_over_budget(family, budget):
    """A tree that is cut into microbatches, some of a single trajectory longer than the budget."""
    planner = PlannerConfig(max_tokens_per_microbatch=budget, sharing="always")
    oversized = (
        pytest.warns(HartsWarning, match="longer than max_tokens_per_microbatch=64") if budget == 64 else nullcontext()
    )
    with oversized:
        check_parity(tiny_model(family, dtype=torch.float64), branching(65, vocab=VOCAB), planner)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("name", "group", "skip"), [("lats_webshop", 0, 0), ("tot_game24", 3, 0), ("vmcts_dafny_bst", 1, 60)]
)
def test_real_tree(family, name, group, skip, data_dir):
    """Real rollout trees, cut to size."""
    rows = real_trajectories(data_dir, name, group=group, vocab=VOCAB, max_tokens=160, skip=skip)
    check_parity(tiny_model(family, dtype=torch.float64), rows[:: max(1, len(rows) // 10)])


@pytest.mark.parametrize("family", FAMILIES)
def test_one_token_trajectories(family):
    """Trajectories of one token have no log-prob, and don't disturb the others."""
    rows = [np.array([5]), np.array([7, 8, 9]), np.array([7])]
    check_parity(tiny_model(family, dtype=torch.float64), rows)
