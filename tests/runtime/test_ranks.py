"""Ranks that share one forest give, together, the gradient of the mean of their losses; ranks are threads here."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.models import VOCAB, shallow_model
from support.oracle import assert_gradients_close, float64_everywhere, gradients, trajectory_log_probs
from support.parity import GRADIENT_TOLERANCE
from support.ranks import on_ranks
from support.schedules import random_placement
from support.trees import branching, random_trajectories
from torch import nn

from harts_hf import PlannerConfig, patch, unpatch
from harts_hf.modeling import RowValue, Sum, add_output
from harts_hf.planner import CostModel
from harts_hf.runtime import OtherRankError, TreeUpdate, TreeWindow, WindowPlanner, WindowRun, placing, window
from harts_hf.tree import RolloutTree

PLANNER = PlannerConfig(max_tokens_per_microbatch=64, sharing="always")
VALUE = RowValue(name="value", module="critic")
SQUARES = Sum(
    name="squares",
    compute=lambda output, one: (output.last_hidden_state[0] ** 2 * one.batch.occurrence_counts[0][:, None]).sum(0),
)


class Rows:
    """Trajectories of a slice: log-probs and entropies of every token but the first, values of every token."""

    def __init__(self, rows):
        self.rows = rows

    def trajectories(self):
        """Some or none."""
        return list(self.rows)

    def stand_in(self):
        """Of a rank without any."""
        return np.array([3, 4, 5])

    def index(self, paths):
        """``[B, L]``, -1 after the end of a row."""
        table = np.full((len(paths), max(map(len, paths), default=1)), -1)
        for row, path in zip(table, paths, strict=True):
            row[: len(path)] = path
        scored = table.copy()
        scored[:, 0] = -1
        return {"log_prob": scored, "entropy": scored, "value": table}


def actor_critic(rows, values):
    """Derivatives depend on values."""
    return (values["log_prob"] ** 2).sum() / 50 + (values["value"] - 0.3)[:, ::2].square().sum() / 20


def supervised(rows, values):
    """Derivatives depend on none; 0 without rows."""
    return -values["log_prob"].sum() / max(1, sum(len(row) - 1 for row in rows))


def of_sums(rows, values):
    """A part of the window's sum, by the slice's share of rows."""
    return (values["log_prob"] ** 2).sum() / 50 + len(rows) * (values["squares"] ** 2).sum() / 1e4


def new_model():
    """float64, with a value head."""
    model = shallow_model("qwen3_5_text", dtype=torch.float64)
    model.critic = nn.Linear(model.config.hidden_size, 1, dtype=torch.float64)
    return model


def patched(model):
    """A patched copy with its outputs."""
    model = patch(copy.deepcopy(model))
    add_output(model, VALUE)
    add_output(model, SQUARES)
    return model


def parts(count):
    """Two ragged slices of each rank; groups straddle ranks, and rank 1 of three has nothing."""
    rows = branching(65, vocab=VOCAB)
    others = random_trajectories(3, vocab=VOCAB, count=5)
    if count == 2:
        return [[rows[:3], rows[3:5]], [rows[5:] + others[:2], others[2:]]]
    return [[rows[:2], rows[2:]], [[], []], [others, [rows[0][:2]]]]


def losses_of_stock(model, loss, slices):
    """The mean over ranks of the losses on the unpatched model, one trajectory at a time."""
    longest = [max((len(row) for row in rows), default=1) for part in slices for rows in part]
    hidden = {}

    def state(row):
        key = tuple(row.tolist())
        if key not in hidden:
            ids = torch.from_numpy(row)[None]
            hidden[key] = model.model(input_ids=ids, use_cache=False).last_hidden_state[0]
        return hidden[key]

    everything = [row for part in slices for rows in part for row in rows]
    squares = sum((state(row) ** 2).sum(0) for row in everything)
    total = 0.0
    for rows, width in zip([rows for part in slices for rows in part], longest, strict=True):
        values = {name: torch.zeros(len(rows), width, dtype=torch.float64) for name in ("log_prob", "value")}
        for number, row in enumerate(rows):
            pad = (0, width - len(row))
            values["log_prob"][number] = nn.functional.pad(trajectory_log_probs(model, row), (1, width - len(row)))
            values["value"][number] = nn.functional.pad(model.critic(state(row))[:, 0], pad)
        total = total + loss(rows, {**values, "squares": squares})
    return total / len(slices)


def expected(loss, slices):
    """Gradients by the unpatched model; the loss is padded as the slices' index pads."""
    model = new_model()
    with float64_everywhere(model):
        losses_of_stock(model, loss, slices).backward()
    return gradients(model)


def run_on_ranks(loss, slices, *, planner=PLANNER, **options):
    """Reports and the mean over ranks of the gradients."""
    start = new_model()
    models = [patched(start) for _ in slices]

    def work(ranks):
        update = TreeUpdate(models[ranks.index], WindowPlanner(config=planner), ranks=ranks, placement="global")
        return update.run(slices[ranks.index], Rows, loss, **options)

    with float64_everywhere(start):
        reports = on_ranks(len(slices), work)
    for report in reports:
        if isinstance(report, Exception):
            raise report
    for model in models:
        unpatch(model)
    found = [gradients(model) for model in models]
    return reports, {name: sum(one[name] for one in found) / len(found) for name in found[0]}


def place_at_random(monkeypatch, seed):
    """The planner of windows puts pieces on ranks drawn at random."""

    def at_random(tree, config):
        execution = "nested" if config.execution == "nested" else "replay"
        return random_placement(tree, seed, execution, config.world_size)

    monkeypatch.setattr(window, "plan_window", at_random)


CASES = {
    "actor_critic": (actor_critic, {"names": ("log_prob", "value")}),
    "supervised": (supervised, {"names": ("log_prob",), "unscored": "always"}),
    "probed": (supervised, {"unscored": "probe"}),
    "sums": (of_sums, {"names": ("log_prob", "squares")}),
}


def check_one_forest(count, loss, options):
    """Gradients are the mean of the ranks' losses', and all ranks see one plan."""
    slices = parts(count)
    reports, found = run_on_ranks(loss, slices, **options)
    assert_gradients_close(found, expected(loss, slices), GRADIENT_TOLERANCE)
    rows = RolloutTree.from_trajectories([row for part in slices for rows in part for row in rows])
    for report in reports:
        assert report.placement == "global" and report.window.rollout_tree.num_tokens == rows.num_tokens
        assert report.scoring_skipped == (loss is supervised and report.window.schedule.execution == "nested")
    assert len({report.window.schedule.to_json() for report in reports}) == 1


@pytest.mark.essential("actor_critic-2")
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_one_forest(name, count):
    """As planned."""
    check_one_forest(count, *CASES[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_random_placements(name, monkeypatch):
    """Whoever computes what."""
    place_at_random(monkeypatch, seed=len(name))
    check_one_forest(3, *CASES[name])


def made_again_beside_gradients(word, schedule):
    """Whether a trunk runs ``F`` for a reader after another reader's backward."""
    place = {op: number for number, op in enumerate(word)}
    readers = [(trunk, one.id) for one in schedule.microbatches for trunk in one.trunks if ("F", trunk) in place]
    before = {trunk for trunk, reader in readers if place["B", reader] < place["F", trunk]}
    return bool(before & {trunk for trunk, reader in readers if place["F", reader] > place["F", trunk]})


@pytest.mark.exhaustive
def test_skipped_on_ranks(monkeypatch):
    """Nested words that are aligned with dummies skip the scoring pass, exactly."""
    place_at_random(monkeypatch, seed=1)
    planner = PlannerConfig(max_tokens_per_microbatch=64, sharing="always", execution="nested")
    reports, found = run_on_ranks(supervised, parts(3), planner=planner, unscored="probe")
    assert all(report.scoring_skipped for report in reports)
    words = [reports[0].window.schedule.rank_ops[rank] for rank in range(3)]
    assert len({"".join(kind for kind, _ in word) for word in words}) > 1
    assert any(made_again_beside_gradients(word, reports[0].window.schedule) for word in words)
    assert_gradients_close(found, expected(supervised, parts(3)), GRADIENT_TOLERANCE)


def test_one_rank_needs_scores():
    """A reason on one rank keeps all of them from skipping, so that losses run equally often."""
    slices = parts(2)
    start = new_model()
    models = [patched(start) for _ in slices]
    calls = [0, 0]

    def work(ranks):
        def loss(rows, values):
            calls[ranks.index] += 1
            return supervised(rows, values)

        update = TreeUpdate(models[ranks.index], WindowPlanner(config=PLANNER), ranks=ranks, placement="global")
        unscored = "never" if ranks.index else "probe"
        return update.run(slices[ranks.index], Rows, loss, unscored=unscored, reason="beta")

    with float64_everywhere(start):
        reports = on_ranks(2, work)
    assert [report.scoring_needed_by for report in reports] == ["beta", "beta"]
    assert calls == [2, 2]


@pytest.mark.exhaustive
@pytest.mark.parametrize("everyone", [True, False])
@pytest.mark.parametrize("placement", ["global", "local"])
def test_values_that_are_known(placement, everyone):
    """Each rank has scored its own trajectories: nothing is scored if all have, everything if one has not."""
    slices = parts(3)
    start = new_model()
    models = [patched(start) for _ in slices]
    names = ("log_prob", "value")
    calls = [0, 0, 0]

    def work(ranks):
        def loss(rows, values):
            calls[ranks.index] += 1
            return actor_critic(rows, values)

        own = [row for rows in slices[ranks.index] for row in rows]
        update = TreeUpdate(models[ranks.index], WindowPlanner(config=PLANNER), ranks=ranks, placement=placement)
        _, kept = update.scored(Rows(own), names)
        passes = [kept] if everyone or ranks.index == 1 else []
        return update.run(slices[ranks.index], Rows, loss, names=names, kept=passes)

    with float64_everywhere(start):
        reports = on_ranks(3, work)
    assert [report.scoring_kept for report in reports] == [everyone] * 3
    assert [report.scoring_needed_by for report in reports] == [None if everyone else "loss"] * 3
    assert calls == [2, 2, 2] and all(report.recompute_difference < 1e-12 for report in reports)
    for model in models:
        unpatch(model)
    found = [gradients(model) for model in models]
    mean = {name: sum(one[name] for one in found) / len(found) for name in found[0]}
    assert_gradients_close(mean, expected(actor_critic, slices), GRADIENT_TOLERANCE)


@pytest.mark.parametrize("on", [0, 1])
def test_a_rank_that_fails(on):
    """All raise, with its number and its words."""
    slices = parts(2)
    models = [patched(new_model()) for _ in slices]

    def work(ranks):
        def loss(rows, values):
            if ranks.index == on:
                raise KeyError("a column")
            return supervised(rows, values)

        update = TreeUpdate(models[ranks.index], WindowPlanner(config=PLANNER), ranks=ranks, placement="global")
        return update.run(slices[ranks.index], Rows, loss)

    raised = on_ranks(2, work)
    assert isinstance(raised[on], KeyError)
    assert isinstance(raised[1 - on], OtherRankError)
    assert str(raised[1 - on]) == f"process {on} raised KeyError: 'a column'"


@pytest.mark.parametrize("placement", ["auto", "global", "local"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_tokens_per_microbatch": 128}, "max_tokens_per_microbatch: 64 on process 0, 128 on process 1"),
        ({"execution": "nested"}, "execution: 'auto' on process 0, 'nested' on process 1"),
        ({"cost": CostModel(source="mine")}, "cost.source: nothing on process 0, 'mine' on process 1"),
    ],
)
def test_other_settings(change, said, placement):
    """Ranks that would meet in other collectives than one another all say which settings differ, before the first."""
    slices = parts(2)
    models = [patched(new_model()) for _ in slices]
    planner = PlannerConfig(max_tokens_per_microbatch=64)

    def work(ranks):
        own = WindowPlanner(config=replace(planner, **change) if ranks.index else planner)
        update = TreeUpdate(models[ranks.index], own, ranks=ranks, placement=placement)
        return update.run(slices[ranks.index], Rows, supervised, unscored="probe")

    for raised in on_ranks(2, work):
        assert isinstance(raised, ValueError) and "expected the same settings of plans" in str(raised), raised
        assert said in str(raised) and ("cost" in change or str(raised).endswith(f"got {said}")), raised


def test_plans_of_other_processes():
    """A plan runs on as many processes as it is for, each its own rank of it."""
    rows = branching(65, vocab=VOCAB)
    several = PlannerConfig(max_tokens_per_microbatch=64, world_size=3)
    model = patch(shallow_model("qwen3_5_text"))
    with pytest.raises(ValueError, match=r"expected rank in \[0, 3\), got 3"):
        TreeWindow(rows, several, rank=3)
    with pytest.raises(ValueError, match="a plan for 1 processes on process 0, got rank 0 of a plan for world_size=3"):
        WindowRun(model, TreeWindow(rows, several, rank=0))
    with pytest.raises(ValueError, match=r"a planner for one rank .* got world_size=3"):
        TreeUpdate(model, WindowPlanner(config=several))
    with pytest.raises(ValueError, match="placement to be one of auto, global, local, got 'everywhere'"):
        TreeUpdate(model, WindowPlanner(), placement="everywhere")


@pytest.mark.parametrize(("shape", "placement"), [("even", "local"), ("uneven", "global")])
def test_auto(shape, placement):
    """Equal ranks that share nothing compute their own; one that has ten times the other's work is relieved."""
    rng = np.random.default_rng(0)
    counts = [16, 16] if shape == "even" else [40, 4]
    slices = [[[rng.integers(2, VOCAB, 600) for _ in range(count)]] for count in counts]
    planner = PlannerConfig(max_tokens_per_microbatch=4096)

    def work(ranks):
        own = slices[ranks.index][0]
        return placing.place(
            WindowPlanner(config=planner),
            own,
            lambda: own[0],
            ranks,
            choice="auto",
            can_skip_scoring=False,
            names=("log_prob",),
            merge=RolloutTree.from_trajectories,
        )

    found = on_ranks(2, work)
    assert [one.placement for one in found] == [placement] * 2, found
    if placement == "global":
        assert [one.first for one in found] == [0, 40]
