"""Sums of routers by slice: Transformers' load-balancing loss of each slice, whatever the plan; float64.

The oracle is the unpatched model, one trajectory at a time, and the function as the family's module has it.
"""

import numpy as np
import pytest
import torch
from support.models import VOCAB, tiny_model
from support.oracle import assert_gradients_close, float64_everywhere, gradients
from support.parity import GRADIENT_TOLERANCE
from support.trees import branching, random_trajectories

from harts_hf import PlannerConfig, patch, unpatch
from harts_hf.modeling import ROUTER_CHOICES, ROUTER_PROBABILITIES, load_balancing_loss
from harts_hf.runtime import TreeUpdate, TreeWindow, WindowPlanner, window_values
from harts_hf.runtime.ranks import Ranks
from harts_hf.runtime.slices import SliceTable

COEFFICIENTS = (0.7, -1.3, 0.4)


def slices():
    """Three slices of ragged trajectories that share prefixes across slices; one row twice, one within another."""
    rows = branching(65, vocab=VOCAB) + random_trajectories(3, vocab=VOCAB, count=4)
    rows += [rows[0], rows[1][: len(rows[1]) // 2]]
    return [rows[0::3], rows[1::3], rows[2::3]]


class Rows:
    """A slice of trajectories; no value per row is asked for."""

    def __init__(self, trajectories):
        self.rows = trajectories

    def trajectories(self):
        return self.rows

    def stand_in(self):
        return np.array([0])

    def index(self, paths):
        return {"log_prob": np.full((1, 1), -1)}


def expected_losses(model, top_k):
    """The loss of each slice by the family's own function, of routers' logits of one trajectory at a time."""
    from transformers.models.qwen3_next.modeling_qwen3_next import load_balancing_loss_func

    losses = []
    for rows in slices():
        logits = [
            model.model(input_ids=torch.from_numpy(row)[None], use_cache=False, output_router_logits=True)
            for row in rows
        ]
        layers = tuple(torch.cat(parts) for parts in zip(*(one.router_logits for one in logits), strict=True))
        losses.append(load_balancing_loss_func(layers, layers[0].shape[-1], top_k))
    return losses


@pytest.mark.parametrize("execution", ["replay", "keep"])
def test_losses_of_slices(execution):
    """Every slice's loss and the gradients of their weighted sum; a tree that is cut where slices share."""
    model = patch(tiny_model("qwen3_next", dtype=torch.float64))
    config = PlannerConfig(max_tokens_per_microbatch=64, sharing="always", execution=execution)
    update = TreeUpdate(model, WindowPlanner(config=config))
    numbered = list(enumerate(slices()))
    seen = {}

    def loss(one, values):
        number = one[0]
        seen[number] = load_balancing_loss(values[ROUTER_PROBABILITIES][number], values[ROUTER_CHOICES][number], 2)
        return COEFFICIENTS[number] * seen[number] + 0 * values["log_prob"].sum()

    with float64_everywhere(model):
        report = update.run(
            numbered,
            lambda one: Rows(one[1]),
            loss,
            names=("log_prob", ROUTER_PROBABILITIES, ROUTER_CHOICES),
            reason="router",
        )
        got = gradients(model)
        model.zero_grad()
        unpatch(model)
        expected = expected_losses(model, 2)
        sum(c * one for c, one in zip(COEFFICIENTS, expected, strict=True)).backward()
    assert len(report.window.batches) > 3
    for number, one in enumerate(expected):
        assert seen[number].item() == pytest.approx(one.item(), rel=1e-12)
    assert_gradients_close(got, gradients(model), GRADIENT_TOLERANCE)


def test_choices_are_exact_counts():
    """As many as there are tokens, layers and choices: integers, whatever the plan."""
    rows = [row for part in slices() for row in part]
    model = patch(tiny_model("qwen3_next", dtype=torch.float64))
    found = []
    for limit in (64, 4096):
        window = TreeWindow(rows, PlannerConfig(max_tokens_per_microbatch=limit, sharing="always"))
        with torch.no_grad():
            found.append(window_values(model, window, (ROUTER_CHOICES,)).sums[ROUTER_CHOICES])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[0].round())
    assert found[0].sum() == sum(map(len, rows)) * 3 * 2


def test_counts_by_slice_add_up():
    """To the occurrence counts, in every microbatch; a stand-in belongs to no slice."""
    parts = slices()
    window = TreeWindow(
        [row for part in parts for row in part], PlannerConfig(max_tokens_per_microbatch=64, sharing="always")
    )
    sizes = [len(part) for part in parts]
    number = window.tree.num_trajectories
    table = SliceTable.of(sizes, Ranks(), is_global=False, num_trajectories=number)
    for batch, microbatch in zip(window.batches, window.schedule.microbatches, strict=True):
        counts = table.counts(window.tree, microbatch)
        assert torch.equal(counts.sum(dim=0), batch.occurrence_counts[0].double())
    nobody = SliceTable.of([0, 0], Ranks(), is_global=False, num_trajectories=1)
    assert nobody.count == 2 and nobody.slice_of.tolist() == [-1]
    assert load_balancing_loss(torch.zeros(8), torch.zeros(8), 2) == 0
