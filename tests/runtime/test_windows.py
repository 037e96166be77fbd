"""Sharing across microbatches: handed states and one backward per trunk, against the unpatched model in float64."""

from itertools import cycle, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import FAMILIES, OF_EACH_KIND, OTHERS, VOCAB, shallow_model, tiny_model
from support.oracle import float64_everywhere
from support.parity import check_parity
from support.schedules import random_schedule
from support.trees import branching, random_trajectories, real_trajectories

from harts_hf import PlannerConfig, RolloutTree, patch, tree_logprobs
from harts_hf.modeling.handoff import HandoffError
from harts_hf.runtime import RunOptions, TreeValues, TreeWindow, WindowRun

EXECUTIONS = ["replay", "nested", "keep"]
# An order of forwards and backwards knows no family: two families with all of them, each other one with one.
RUNS = [*product(OF_EACH_KIND, EXECUTIONS), *zip(OTHERS, cycle(EXECUTIONS), strict=False)]


def planner(budget, execution="replay"):
    """Everything shared, in microbatches of ``budget`` rows."""
    return PlannerConfig(max_tokens_per_microbatch=budget, sharing="always", execution=execution)


@pytest.mark.essential("bailing_hybrid-replay", "bailing_hybrid-keep", "qwen3_5_text-nested")
@pytest.mark.parametrize(("family", "execution"), RUNS)
def test_planned_windows(family, execution):
    """Trunks inside trunks at 64 rows a microbatch, every family and every execution."""
    rows = branching(65, vocab=VOCAB) + random_trajectories(3, vocab=VOCAB, count=4)
    assert max(len(m.trunks) for m in TreeWindow(rows, planner(64)).schedule.microbatches) >= 2
    check_parity(tiny_model(family, dtype=torch.float64), rows, planner(64, execution))


@pytest.mark.essential("bailing_hybrid-nested")
@pytest.mark.parametrize(("family", "execution"), product(OF_EACH_KIND, EXECUTIONS))
def test_activation_checkpointing(family, execution):
    """States are exported once although layer bodies run twice. (Each family's, in `test_random_tree`.)"""
    model = tiny_model(family, dtype=torch.float64, seed=2)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    check_parity(model, branching(127, vocab=VOCAB), planner(70, execution))


@pytest.mark.slow
@settings(max_examples=16)
@given(
    family=st.sampled_from(FAMILIES),
    execution=st.sampled_from(EXECUTIONS),
    seed=st.integers(0, 10**6),
    checkpointing=st.booleans(),
    pieces=st.integers(2, 9),
)
def test_any_valid_schedule(family, execution, seed, checkpointing, pieces):
    """Schedules that no planner would make: any cut, any mix of sharing and recomputing, any dropped trunk."""
    rows = random_trajectories(seed, vocab=VOCAB, count=5, max_piece=70)
    schedule = random_schedule(RolloutTree.from_trajectories(rows), seed, execution, pieces=pieces)
    schedule.validate()
    model = shallow_model(family, dtype=torch.float64)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    check_parity(model, rows, schedule=schedule)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["miniswe_b_drop", "tau_airline_a"])
def test_real_trees(name):
    """Spines of forks and long shared prompts, cut to size."""
    rows = real_trajectories(name, group=0, vocab=VOCAB, max_tokens=400)
    check_parity(tiny_model("bailing_hybrid", dtype=torch.float64), rows[:6], planner(96))


def running(execution="replay", **options):
    """A model, a window of several microbatches, and its run."""
    model = tiny_model("qwen3_5_text", dtype=torch.float64)
    rows = branching(65, vocab=VOCAB)
    window = TreeWindow(rows, planner(64, execution))
    tree_logprobs(model, [[1, 2]])  # patches
    return model, window, WindowRun(model, window, **options)


def run_backward(model, window, run):
    """Scores, then the backward of the sum of log-probs; returns the gradients."""
    model.zero_grad()
    run.score()
    run.backward(TreeValues(rows={"log_prob": torch.ones(window.tree.num_tokens)}), torch.Tensor.backward)
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.essential("keep")
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_nothing_stays_alive(execution):
    """Every handed state and gradient is freed by the end."""
    model, window, run = running(execution)
    run_backward(model, window, run)
    assert run.handoff.num_bytes() == 0


@pytest.mark.essential("nested")
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_offloaded_states(execution):
    """States that lie on the CPU between uses give the same gradients."""
    model, window, run = running(execution)
    expected = run_backward(model, window, run)
    offloaded = run_backward(model, window, WindowRun(model, window, RunOptions(offload=True)))
    assert all(torch.equal(a, b) for a, b in zip(expected, offloaded, strict=True))


def test_executions_agree():
    """The three executions run the same microbatches; only the order of sums differs."""
    results = []
    for execution in EXECUTIONS:
        model, window, run = running(execution)
        results.append(run_backward(model, window, run))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.essential("qwen3_5_text")
@pytest.mark.parametrize("family", ["qwen3_5_text", "bailing_hybrid"])
def test_a_split_run_equals_an_unsplit_run(family):
    """Seven microbatches and one give the same gradients."""
    results = []
    for budget in (64, 4096):
        model, window = patch(tiny_model(family, dtype=torch.float64)), TreeWindow(split_rows(), planner(budget))
        with float64_everywhere(model):
            results.append((len(window.batches), run_backward(model, window, WindowRun(model, window))))
    (many, split), (one, whole) = results
    assert (many, one) == (7, 1)
    for a, b in zip(split, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def split_rows():
    """A tree of trunks inside trunks."""
    return branching(65, vocab=VOCAB) + random_trajectories(3, vocab=VOCAB, count=4)


def test_freed_states_are_an_error():
    """A dependent that runs when its trunk's states are gone says so."""
    _, window, run = running()
    run.score()
    for trunk in range(len(window.batches)):
        run.handoff.drop_values(trunk)
    with pytest.raises(HandoffError, match="freed or never computed"):
        run.backward(TreeValues(rows={"log_prob": torch.ones(window.tree.num_tokens)}), torch.Tensor.backward)


def test_a_trunk_before_its_dependents_is_an_error():
    """A trunk's backward that would miss gradients says so."""
    _, window, run = running()
    run.score()
    ops, count = run._ops, len(window.batches)
    run._ops = [*ops[:count], ("F", 0), ("B", 0), *ops[count:-2]]
    with pytest.raises(HandoffError, match="backward of microbatch 0 after 0 of the"):
        run.backward(TreeValues(rows={"log_prob": torch.ones(window.tree.num_tokens)}), torch.Tensor.backward)


def test_a_dependent_before_its_trunk_is_an_error():
    """A dependent's forward before its trunk's says so."""
    _, _, run = running()
    run._ops = run._ops[1:]
    with pytest.raises(HandoffError, match="of microbatch 0, which were freed or never computed"):
        run.score()


def test_a_schedule_for_another_tree():
    """A schedule made for other trajectories is refused."""
    rows = branching(65, vocab=VOCAB)
    schedule = TreeWindow(rows, planner(64)).schedule
    with pytest.raises(ValueError, match="another trajectory 1"):
        TreeWindow.from_schedule([rows[0], rows[1][:-1], *rows[2:]], schedule)
    with pytest.raises(ValueError, match="for 2 trajectories, got one for 6"):
        TreeWindow.from_schedule(rows[:2], schedule)


def test_second_backward_is_an_error():
    """The schedule of tree_logprobs runs once."""
    model = tiny_model("qwen3_5_text")
    total = tree_logprobs(model, branching(65, vocab=VOCAB), planner(64))[0].sum()
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second time"):
        total.backward()


def test_no_gradients_asked_for():
    """Under no_grad only scoring runs, and nothing is kept."""
    model = tiny_model("qwen3_5_text")
    with torch.no_grad():
        values = tree_logprobs(model, branching(65, vocab=VOCAB), planner(64, "keep"))
    assert not values[0].requires_grad
