"""tree_logprobs against the unpatched model, one trajectory at a time, in float64; the budget is in support.parity."""

from contextlib import nullcontext
from itertools import cycle

import numpy as np
import pytest
import torch
from support.models import FAMILIES, OF_EACH_KIND, OTHERS, VOCAB, shallow_model, tiny_model
from support.parity import check_parity
from support.trees import BRANCH_DEPTHS, branching, random_trajectories, real_trajectories

from harts_hf import PlannerConfig
from harts_hf.errors import HartsWarning


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family(model_type):
    """A branch one row past a chunk, with an interior end, a duplicate and a second root."""
    check_parity(tiny_model(model_type, dtype=torch.float64), branching(65, vocab=VOCAB))


@pytest.mark.essential("bailing_hybrid-64", "qwen3_5_text-2", "qwen3_5_text-127")
@pytest.mark.parametrize("depth", [depth for depth in BRANCH_DEPTHS if depth != 65])
@pytest.mark.parametrize("family", OF_EACH_KIND)
def test_branch_depths(family, depth):
    """A branch elsewhere around a chunk boundary: which depth it is knows the rule's kernel, not the family."""
    check_parity(shallow_model(family, dtype=torch.float64), branching(depth, vocab=VOCAB))


@pytest.mark.essential("bailing_hybrid-plain", "qwen3_5_text-checkpointing")
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("family", FAMILIES)
def test_random_tree(family, checkpointing):
    """Random forks, at a temperature, with and without activation checkpointing."""
    model = tiny_model(family, dtype=torch.float64, seed=3)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    check_parity(model, random_trajectories(5, vocab=VOCAB), temperature=0.7)


@pytest.mark.essential("bailing_hybrid-64", "qwen3_5_text-150")
@pytest.mark.parametrize(
    ("family", "budget"), [*((family, 64) for family in FAMILIES), *((family, 150) for family in OF_EACH_KIND)]
)
def test_cuts_that_compute_prefixes_again(family, budget):
    """A tree that is cut without handing states over; at 64 rows some trajectories are longer than the budget."""
    planner = PlannerConfig(max_tokens_per_microbatch=budget, sharing="always", handoff=False)
    too_long = pytest.warns(HartsWarning, match="longer than max_tokens_per_microbatch=64")
    with too_long if budget == 64 else nullcontext():
        check_parity(tiny_model(family, dtype=torch.float64), branching(65, vocab=VOCAB), planner)


REAL = [("lats_webshop", 0), ("tot_game24", 3), ("vmcts_dafny_bst", 1)]


@pytest.mark.essential("lats_webshop-0-bailing_hybrid", "vmcts_dafny_bst-1-qwen3_5_text")
@pytest.mark.parametrize(
    ("name", "group", "family"),
    [
        *((*group, family) for group in REAL for family in OF_EACH_KIND),
        *((*group, family) for group, family in zip(cycle(REAL), OTHERS, strict=False)),
    ],
)
def test_real_tree(family, name, group):
    """Real rollout trees, cut to size: all of them for two families, one for each other."""
    rows = real_trajectories(name, group=group, vocab=VOCAB, max_tokens=160)
    check_parity(tiny_model(family, dtype=torch.float64), rows[:: max(1, len(rows) // 10)])


@pytest.mark.parametrize("family", FAMILIES)
def test_one_token_trajectories(family):
    """Trajectories of one token have no log-prob, and don't disturb the others."""
    rows = [np.array([5]), np.array([7, 8, 9]), np.array([7])]
    check_parity(tiny_model(family, dtype=torch.float64), rows)
