"""Sums of routers: Transformers' load-balancing loss of each slice, loads as counts, whatever the plan; float64.

The oracle is the unpatched model, one trajectory at a time, and the loss as the family's module has it. Ranks are
threads.
"""

import copy

import numpy as np
import pytest
import torch
from support.models import MOE_FAMILIES, VOCAB, tiny_model
from support.oracle import assert_gradients_close, float64_everywhere, gradients
from support.parity import GRADIENT_TOLERANCE, check_run_parity
from support.ranks import on_ranks
from support.trees import branching, random_trajectories
from transformers.models.qwen3_next.modeling_qwen3_next import load_balancing_loss_func

from harts_hf import PlannerConfig, patch, unpatch
from harts_hf.modeling import EXPERT_LOAD, ROUTER_CHOICES, ROUTER_PROBABILITIES, find_routers, load_balancing_loss
from harts_hf.runtime import TreeUpdate, TreeValues, TreeWindow, WindowPlanner, WindowRun, window_values
from harts_hf.runtime.options import RunOptions
from harts_hf.runtime.ranks import Ranks
from harts_hf.runtime.slices import SliceTable

COEFFICIENTS = (0.7, -1.3, 0.4, 1.1, -0.2, 0.9)
TOP_K = 2


def slices():
    """Six ragged slices that share prefixes; a row twice, one that ends in another, and a slice without any."""
    rows = branching(65, vocab=VOCAB) + random_trajectories(3, vocab=VOCAB, count=4)
    rows += [rows[0], rows[1][: len(rows[1]) // 2]]
    return [*(rows[start::5] for start in range(4)), [], rows[4::5]]


def planner(execution="replay", limit=64):
    return PlannerConfig(max_tokens_per_microbatch=limit, sharing="always", execution=execution)


class Rows:
    """A slice of trajectories; no value per row is asked for."""

    def __init__(self, trajectories):
        self.rows = trajectories

    def trajectories(self):
        return self.rows

    def stand_in(self):
        return np.array([3, 4])

    def index(self, paths):
        return {"log_prob": np.full((1, 1), -1)}


def expected_losses(model):
    """By the family's own function, of routers' logits of one trajectory at a time; 0 without any."""
    losses = []
    for rows in slices():
        outputs = [
            model.model(input_ids=torch.from_numpy(row)[None], use_cache=False, output_router_logits=True)
            for row in rows
        ]
        if not outputs:
            losses.append(torch.zeros(()))
            continue
        layers = tuple(torch.cat(parts) for parts in zip(*(one.router_logits for one in outputs), strict=True))
        losses.append(load_balancing_loss_func(layers, layers[0].shape[-1], TOP_K))
    return losses


@pytest.mark.essential("2-global-replay")
@pytest.mark.parametrize(
    ("count", "placement", "execution"),
    [
        (1, "global", "replay"),
        (1, "global", "keep"),
        (2, "global", "replay"),
        (2, "local", "replay"),
        (3, "global", "replay"),
    ],
)
def test_losses_of_slices(count, placement, execution):
    """Every slice's loss, gradients of their weighted sum and the load, on ranks that compute one another's rows."""
    start = tiny_model("qwen3_next", dtype=torch.float64)
    models = [patch(copy.deepcopy(start)) for _ in range(count)]
    numbered = list(enumerate(slices()))
    per_rank = len(numbered) // count
    seen = {}

    def loss(one, values):
        number = one[0]
        sums = values[ROUTER_PROBABILITIES][number], values[ROUTER_CHOICES][number]
        seen[number] = load_balancing_loss(*sums, TOP_K)
        return COEFFICIENTS[number] * seen[number] + 0 * values["log_prob"].sum()

    def work(ranks):
        config = planner(execution)
        update = TreeUpdate(
            models[ranks.index],
            WindowPlanner(config=config),
            ranks=ranks,
            placement=placement,
            observed=(EXPERT_LOAD,),
        )
        own = numbered[ranks.index * per_rank : (ranks.index + 1) * per_rank]
        names = ("log_prob", ROUTER_PROBABILITIES, ROUTER_CHOICES)
        return update.run(own, lambda one: Rows(one[1]), loss, names=names, reason="router")

    with float64_everywhere(start):
        reports = on_ranks(count, work)
        for report in reports:
            if isinstance(report, Exception):
                raise report
        window = TreeWindow([row for part in slices() for row in part], planner())
        with torch.no_grad():
            load = window_values(models[0], window, (EXPERT_LOAD,)).sums[EXPERT_LOAD]
        for report in reports:
            assert torch.equal(report.sums[EXPERT_LOAD], load)
        expected = expected_losses(start)
        sum(c * one for c, one in zip(COEFFICIENTS, expected, strict=True)).backward()
    assert sum(len(report.window.batches) for report in reports) > 3
    for number, one in enumerate(expected):
        assert seen[number].item() == pytest.approx(one.item(), rel=1e-6)  # Transformers' is float32
    for model in models:
        unpatch(model)
    found = [gradients(model) for model in models]
    total = {name: sum(one[name] for one in found) for name in found[0]}
    assert_gradients_close(total, gradients(start), GRADIENT_TOLERANCE)


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_load_of_experts(family):
    """Integers, equal to counts over the expanded tokens of what stock routers choose, whatever the plan."""
    rows = [row for part in slices() for row in part]
    model = tiny_model(family, dtype=torch.float64)
    routers = find_routers(model)
    expected = torch.zeros(len(routers), 8, dtype=torch.float64)

    def count(number):
        def hook(_, inputs, answer):
            expected[number] += torch.bincount(answer[2].flatten(), minlength=8)

        return routers[number].register_forward_hook(hook)

    handles = [count(number) for number in range(len(routers))]
    with float64_everywhere(model), torch.no_grad():
        for row in rows:
            model(input_ids=torch.from_numpy(row)[None], use_cache=False)
        for handle in handles:
            handle.remove()
        patch(model)
        for limit in (64, 4096):
            window = TreeWindow(rows, planner(limit=limit))
            load = window_values(model, window, (EXPERT_LOAD,)).sums[EXPERT_LOAD]
            assert torch.equal(load, expected)


@pytest.mark.parametrize("family", ["qwen3_next", "bailing_hybrid"])
def test_choices_are_exact_counts(family):
    """Integers, whatever the plan: the largest of ``softmax(logits)``, whatever experts tokens go to."""
    rows = [row for part in slices() for row in part]
    model = flipping(tiny_model(family, dtype=torch.float64), always=True)
    expected = torch.zeros(8, dtype=torch.float64)
    found = []
    with float64_everywhere(model), torch.no_grad():
        for row in rows:
            answer = model.model(input_ids=torch.from_numpy(row)[None], use_cache=False, output_router_logits=True)
            for logits in answer.router_logits:
                expected += torch.bincount(logits.softmax(dim=-1).topk(TOP_K).indices.flatten(), minlength=8)
        patch(model)
        for limit in (64, 4096):
            values = window_values(model, TreeWindow(rows, planner(limit=limit)), (ROUTER_CHOICES,))
            found.append(values.sums[ROUTER_CHOICES])
    assert all(torch.equal(one[0], expected) for one in found)
    assert expected.sum() == sum(map(len, rows)) * len(find_routers(model)) * TOP_K


def test_counts_by_slice_add_up():
    """To the occurrence counts, in every microbatch; a stand-in belongs to no slice."""
    parts = slices()
    window = TreeWindow([row for part in parts for row in part], planner())
    sizes = [len(part) for part in parts]
    number = window.tree.num_trajectories
    table = SliceTable.of(sizes, Ranks(), is_global=False, num_trajectories=number)
    for batch, microbatch in zip(window.batches, window.schedule.microbatches, strict=True):
        counts = table.counts(window.tree, microbatch)
        assert torch.equal(counts.sum(dim=0), batch.occurrence_counts[0].double())
    nobody = SliceTable.of([0, 0], Ranks(), is_global=False, num_trajectories=1)
    assert nobody.count == 2 and nobody.slice_of.tolist() == [-1]
    assert load_balancing_loss(torch.zeros(8), torch.zeros(8), TOP_K) == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "checkpointing"), [*((family, False) for family in MOE_FAMILIES), ("bailing_hybrid", True)]
)
def test_replayed_routes_are_the_stock_model(family, checkpointing):
    """Weights that are computed anew at recorded experts are those of the router, and so are their gradients."""
    model = tiny_model(family, dtype=torch.float64)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    rows = branching(65, vocab=VOCAB)
    check_run_parity(model, rows, planner(), replay_routing=True)


def flipping(model, *, always=False):
    """Every router's first choice is the next expert, wherever gradients are computed; before ``patch``."""

    def flip(router, inputs, answer):
        logits, weights, experts = answer
        if always or torch.is_grad_enabled():
            experts = experts.clone()
            experts[:, 0] = (experts[:, 0] + 1) % logits.shape[-1]
        return logits, weights, experts

    for router in find_routers(model):
        router.register_forward_hook(flip)
    return model


@pytest.mark.exhaustive
@pytest.mark.parametrize("checkpointing", [False, True])
def test_flips(checkpointing):
    """Routes of the scoring pass are taken where the backward's forward would choose others, and flips are counted."""
    rows = branching(65, vocab=VOCAB)
    window = TreeWindow(rows, planner())
    weights = torch.randn(window.tree.num_tokens, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = {}
    for name, flips, replays in (("still", False, False), ("flipped", True, False), ("replayed", True, True)):
        model = tiny_model("bailing_hybrid", dtype=torch.float64)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        patch(flipping(model) if flips else model)
        with float64_everywhere(model):
            run = WindowRun(model, window, RunOptions(replay_routing=replays))
            run.score()
            run.backward(TreeValues(rows={"log_prob": weights}), torch.Tensor.backward)
        found[name] = gradients(model), run
    assert_gradients_close(found["replayed"][0], found["still"][0], GRADIENT_TOLERANCE)
    with pytest.raises(AssertionError):
        assert_gradients_close(found["flipped"][0], found["still"][0], GRADIENT_TOLERANCE)
    counts = found["replayed"][1].routes.counts
    changed, of = counts.flipped, counts.replayed
    assert of == window.tree.num_tokens * 2 * TOP_K  # two layers with experts
    assert 0.3 < changed / of <= 0.5  # one of two choices, unless the next expert was the other choice
    assert found["replayed"][1].recompute_difference < 1e-10 < found["flipped"][1].recompute_difference
