"""The parts of verification: draws, kinds of parameters, the ways of computing, and the limits."""

import inspect
import math
from functools import partial, wraps

import numpy as np
import pytest
import torch
from support.models import FAMILIES, MOE_FAMILIES, SHALLOW, VOCAB, shallow_model, tiny_model
from support.oracle import float64_everywhere
from support.trees import branching, random_trajectories

from harts_hf import RolloutTree
from harts_hf.forest import random_tokens
from harts_hf.modeling.families import family_of
from harts_hf.verify import comparison, verify
from harts_hf.verify.draws import draw_trajectories
from harts_hf.verify.kinds import parameter_kinds
from harts_hf.verify.layers import LayeredOracle
from harts_hf.verify.oracle import build_oracle
from harts_hf.verify.roundings import RandomRoundings
from harts_hf.verify.verdict import GradientErrors, LogProbs, judge
from harts_hf.verify.ways import (
    AGAIN,
    BATCHED,
    EXPANDED,
    JUDGED,
    ORACLE,
    ROUNDED,
    TREE,
    measure_expanded,
    measure_oracle,
)


def trees(count: int = 4) -> list[RolloutTree]:
    """Random groups."""
    return [RolloutTree.from_trajectories(random_trajectories(seed, vocab=VOCAB)) for seed in range(count)]


def test_whole_groups_are_taken_while_they_fit():
    """Every trajectory of a taken group is there, and the budget holds; the seed decides."""
    groups = trees()
    budget = sum(tree.num_expanded_tokens for tree in groups[:2])
    draws = [draw_trajectories(groups, max_tokens=budget, vocab_size=VOCAB, seed=seed) for seed in (0, 0, 1)]
    for draw in draws:
        assert sum(map(len, draw.trajectories)) <= budget
        assert not draw.is_cut and not draw.is_filled
        assert len(draw.trajectories) == 7 * draw.num_groups
    as_lists = [[row.tolist() for row in draw.trajectories] for draw in draws]
    assert as_lists[0] == as_lists[1] != as_lists[2]


@pytest.mark.parametrize("budget", [2, 40, 150])
def test_a_group_that_does_not_fit_is_cut_around_a_branch(budget):
    """Neighbours are cut to windows: within the budget, at least two tokens each, and sharing where there is room."""
    trunk = np.arange(500) % 40
    rows = [np.concatenate([trunk, [40 + i], trunk[: 30 * i]]) for i in range(4)]
    draw = draw_trajectories([RolloutTree.from_trajectories(rows)], max_tokens=budget, vocab_size=VOCAB)
    assert draw.is_cut and sum(map(len, draw.trajectories)) <= budget
    assert all(len(row) > 1 for row in draw.trajectories)
    if budget == 150:
        tree = RolloutTree.from_trajectories(draw.trajectories)
        assert tree.num_children.max() > 1 and tree.sharing_ratio > 1.3


def test_random_tokens_differ_between_siblings():
    """A shape gets tokens that merge to the very same tree, roots included."""
    shape = RolloutTree.from_shape([-1, 0, 0, 0, 2, -1], [3, 2, 1, 4, 2, 1], [1, 2, 3, 4, 5, 0])
    tokens = random_tokens(shape, 4, np.random.default_rng(0))
    assert tokens.min() >= 0 and tokens.max() < 4
    again = RolloutTree.from_trajectories([tokens[shape.path(i)] for i in range(shape.num_trajectories)])
    assert again.num_tokens == shape.num_tokens
    assert sorted(again.occurrence_counts) == sorted(shape.occurrence_counts)
    with pytest.raises(ValueError, match="at most 2 siblings"):
        random_tokens(shape, 2, np.random.default_rng(0))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_has_a_kind(family):
    """Each family has gates, A_log and dt_bias as kinds of their own, in its linear layers only."""
    model = tiny_model(family)
    kinds = parameter_kinds(model)
    expected = {"A_log", "dt_bias", "convolutions", "norms", "embeddings", "attention projections"}
    expected |= set() if model.config.tie_word_embeddings else {"head"}
    assert set(kinds.values()) >= expected | {"linear attention gates", "linear attention projections"}
    assert {name for name, kind in kinds.items() if kind == "A_log"} == {n for n in kinds if n.endswith("A_log")}
    of_full_layer = {kind for name, kind in kinds.items() if ".layers.1." in name}
    assert not of_full_layer & {"A_log", "convolutions", "linear attention gates", "linear attention projections"}
    assert ("experts" in kinds.values()) == ("routers" in kinds.values()) == (family in MOE_FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_batches_compute_the_same(family):
    """In float64 batches padded on the right give the log-probs and gradients of one trajectory at a time."""
    model = tiny_model(family, dtype=torch.float64, seed=3)
    rows = [row for row in branching(65, vocab=VOCAB) if len(row) > 1]
    weights = [torch.randn(len(row) - 1) for row in rows]
    with float64_everywhere(model):
        alone = measure_expanded(model, rows, weights)
        batched = measure_expanded(model, rows, weights, batch_size=2)
    assert (alone.log_probs - batched.log_probs).abs().max() < 1e-10
    for name, gradient in alone.gradients.items():
        torch.testing.assert_close(batched.gradients[name], gradient, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", ["kimi_linear", "qwen3_5_text"])
def test_the_oracle_runs_no_foreign_kernels(family, monkeypatch):
    """Kernels that stand in for Transformers' functions know no float64; the oracle goes round them."""
    model = tiny_model(family, dtype=torch.float64)
    module, rule = family_of(model).module, family_of(model).rule_function

    def foreign_kernel_for(function):
        @wraps(function)
        def kernel(*_, **__):
            raise AssertionError("a foreign kernel ran")

        return kernel

    for name in ("causal_conv1d_fn", rule):
        monkeypatch.setattr(module, name, foreign_kernel_for(inspect.unwrap(getattr(module, name))))
    rows, weights = [np.arange(2, 9)], [torch.ones(6)]
    with float64_everywhere(model):
        measure_expanded(model, rows, weights)
    with pytest.raises(AssertionError, match="a foreign kernel ran"):
        measure_expanded(model, rows, weights)


@pytest.mark.essential("bailing_hybrid-0.5", "bailing_hybrid-0.0")
@pytest.mark.parametrize(
    ("family", "router_loss"),
    [("bailing_hybrid", 0.5), ("bailing_hybrid", 0.0), ("qwen3_5_text", 0.0), ("qwen3_next", 0.5)],
)
def test_an_oracle_by_layers_is_the_copy_in_float64(family, router_loss):
    """Log-probs bit for bit, gradients to the float32 of their sums; weights that are used twice; the model stays."""
    model = tiny_model(family, dtype=torch.bfloat16, seed=3, tie_word_embeddings=family == "qwen3_5_text").eval()
    model.model.layers[0].requires_grad_(False)
    before = [(name, parameter) for name, parameter in model.named_parameters()]
    buffers = [(name, buffer) for name, buffer in model.named_buffers()]
    rows = [row for row in branching(65, vocab=VOCAB) if len(row) > 1][:3]
    weights = [torch.randn(len(row) - 1) for row in rows]
    copied = measure_oracle(build_oracle(model), rows, weights, router_loss=router_loss)
    layered = measure_oracle(LayeredOracle(model), rows, weights, router_loss=router_loss)
    assert torch.equal(layered.log_probs, copied.log_probs)
    assert layered.gradients.keys() == copied.gradients.keys() and len(layered.gradients) < len(before)
    for name, exact in copied.gradients.items():
        assert (layered.gradients[name] - exact).abs().max() <= 1e-6 * exact.abs().max(), name
    assert all(a[0] == b[0] and a[1] is b[1] for a, b in zip(before, model.named_parameters(), strict=True))
    assert all(a[0] == b[0] and a[1] is b[1] for a, b in zip(buffers, model.named_buffers(), strict=True))
    assert not [module for module in model.modules() if "forward" in vars(module)]
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.exhaustive
def test_memory_decides_which_oracle(monkeypatch):
    """A copy where it fits, layers where their sums do, and none elsewhere; the verdict by layers is the copy's."""
    model = shallow_model("qwen3_5_text", dtype=torch.bfloat16, seed=3)
    count = sum(parameter.numel() for parameter in model.parameters())
    found = {}
    for per_parameter, kind in ((37, torch.nn.Module), (35, LayeredOracle), (11, type(None))):
        monkeypatch.setattr("harts_hf.verify.oracle._free_bytes", lambda _, size=per_parameter * count: size)
        assert isinstance(build_oracle(model), kind)
        found[kind] = verify(model, [branching(3, vocab=VOCAB)])
    assert [one.reference for one in found.values()] == [ORACLE, ORACLE, EXPANDED]
    copied, layered, _ = found.values()
    for one, other in zip(copied.kinds, layered.kinds, strict=True):
        assert other.ratio == pytest.approx(one.ratio, rel=1e-3)


def test_the_model_is_left_as_it_was():
    """No gradient, no patch, no change of a parameter stays behind."""
    model = shallow_model("qwen3_5_text")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    classes = [type(module) for module in model.modules()]
    assert verify(model, [branching(3, vocab=VOCAB)]).passed
    assert [type(module) for module in model.modules()] == classes and "forward" not in vars(model)
    for name, parameter in model.named_parameters():
        assert parameter.grad is None and torch.equal(parameter, before[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "with_oracle"), [("bailing_hybrid", True), ("qwen3_5_text", False)])
def test_gradients_that_are_zero_in_theory(family, with_oracle):
    """Where each query sees one key, expanded's gradient of queries and keys is 0 and the tree's a rounding: PASS."""
    steps = set()
    rows = [np.array([3, 4]), np.array([5, 6])]
    model = tiny_model(family, **SHALLOW)
    if family == "bailing_hybrid":
        model.set_experts_implementation("grouped_mm")  # as loaded models have it: experts' numbers are held as floats
    verdict = verify(model, [rows], with_oracle=with_oracle, progress=lambda _, way: steps.add(way))
    assert verdict.passed, verdict.failures
    assert ROUNDED in steps and all(math.isfinite(kind.errors[ROUNDED]) for kind in verdict.kinds)


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [1e-4, math.nan])
def test_a_small_wrong_gradient_on_short_rollouts(size, monkeypatch):
    """A relative error of 1e-4 in one gradient is far above roundings, on two trajectories of two tokens too."""

    def measure(original, *arguments, **options):
        measured = original(*arguments, **options)
        measured.gradients["model.layers.0.linear_attn.out_proj.weight"].mul_(1 + size)
        return measured

    monkeypatch.setattr(comparison, "measure_tree", partial(measure, comparison.measure_tree))
    verdict = verify(shallow_model("qwen3_5_text"), [[np.array([3, 4]), np.array([5, 6])]])
    assert {check.name for check in verdict.failures} >= {
        f"gradient of model.layers.0.linear_attn.out_proj.weight on the {way}" for way in JUDGED
    }


@pytest.mark.exhaustive
def test_a_wrong_gradient_that_is_zero_in_theory(monkeypatch):
    """A thousandth of a usual gradient where there should be none is no rounding."""

    def measure(original, *arguments, **options):
        measured = original(*arguments, **options)
        measured.gradients["model.layers.1.self_attn.q_norm.weight"].add_(
            1e-3 * measured.gradients["model.norm.weight"][:16]
        )
        return measured

    monkeypatch.setattr(comparison, "measure_tree", partial(measure, comparison.measure_tree))
    verdict = verify(shallow_model("qwen3_5_text"), [[np.array([3, 4]), np.array([5, 6])]])
    assert "gradient of model.layers.1.self_attn.q_norm.weight on the tree" in {one.name for one in verdict.failures}


def test_roundings_at_random():
    """A difference of equal sums has the scatter of its terms' roundings; zeros, copies and integers stay."""
    x = torch.full((1000,), 3.0)
    with RandomRoundings(x.device, seed=0):
        difference = x * 5 - x * 5
        exact = torch.cat([x, torch.zeros(3) * x[:3], torch.arange(3).float()])
        counts = torch.histc(torch.arange(4).float(), bins=4, min=0, max=3)
    assert torch.equal(exact, torch.cat([x, torch.zeros(3), torch.arange(3).float()]))
    assert counts.tolist() == [1, 1, 1, 1]
    # Each product is moved when it is made and when it is read.
    expected = 15 * torch.finfo(torch.float32).eps * 2
    assert 0.8 * expected < difference.square().mean().sqrt() < 1.25 * expected
    assert not (x * 5 - x * 5).any()


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.linear_attn.A_log"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_models_that_are_not_finite(name, value):
    """Refused by name before anything is computed."""
    model = shallow_model("qwen3_5_text")
    model.get_parameter(name).data.view(-1)[0] = value
    with pytest.raises(ValueError, match=f"to be finite, got NaN or infinity in {name}"):
        verify(model, [branching(3, vocab=VOCAB)], progress=lambda *_: pytest.fail("the work has begun"))


def test_models_that_compute_infinity():
    """Finite parameters may overflow all the same: there is nothing to compare with."""
    model = shallow_model("qwen3_5_text")
    model.lm_head.weight.data.mul_(1e38)
    with pytest.raises(ValueError, match="results of the unpatched model to be finite, got NaN or infinity in "):
        verify(model, [branching(3, vocab=VOCAB)])


@pytest.mark.parametrize("draws", [[], [[]], [[np.arange(3), np.arange(1)]]])
def test_draws_that_predict_nothing(draws):
    """No draw, an empty one, a trajectory of one token."""
    with pytest.raises(ValueError, match=r"expected at least one draw|expected trajectories of at least two tokens"):
        verify(shallow_model("qwen3_5_text"), draws)


@pytest.mark.parametrize("budget", [2, 6, 1000])
def test_trajectories_of_one_token_are_left_out(budget):
    """They predict nothing, whole or cut, and groups of nothing else neither fill a draw nor empty it."""
    single = RolloutTree.from_trajectories([[5], [5]])
    mixed = RolloutTree.from_trajectories([[7], *([7, i, *range(3, 40)] for i in range(2)), [9]])
    for seed in range(5):
        draw = draw_trajectories([single, mixed], max_tokens=budget, vocab_size=VOCAB, seed=seed)
        assert draw.trajectories and all(len(row) > 1 for row in draw.trajectories)
        assert draw.is_cut == (budget < 1000)
    with pytest.raises(ValueError, match="expected a trajectory of at least two tokens, got none"):
        draw_trajectories([single], max_tokens=budget, vocab_size=VOCAB)


@pytest.mark.exhaustive
def test_draws_of_the_same_trajectories_count_as_one():
    """Weights alone make no independent draw: the limits stay those of a single one."""
    rows, others = branching(3, vocab=VOCAB), branching(2, vocab=VOCAB, seed=1)
    same, different = (verify(shallow_model("qwen3_5_text"), draws) for draws in ([rows] * 4, [rows, others]))
    assert all(kind.limit == 4 for kind in same.kinds)
    assert same.differences[TREE].largest == verify(shallow_model("qwen3_5_text"), [rows]).differences[TREE].largest
    assert different.passed and same.passed


def verdict_of(way: str, tree: list[float], expanded: list[float], *, log_prob_error: float = 1e-7):
    """A verdict on made-up errors of one parameter, a number a draw, the reference's square being 1.

    The errors are those of one judged way; the other one's are the expanded computation's.
    """
    exact = torch.linspace(-4, -1, 50).double()
    errors = dict.fromkeys((EXPANDED, AGAIN, BATCHED, *JUDGED), 1e-7) | {way: log_prob_error, ORACLE: 0.0}
    log_probs = {one: [exact + error for _ in tree] for one, error in errors.items()}
    squared = dict.fromkeys((EXPANDED, AGAIN, BATCHED, *JUDGED), expanded) | {way: tree}
    gradient = GradientErrors(
        kind="norms",
        squares=[1.0] * len(tree),
        errors={one: [value**2 for value in values] for one, values in squared.items()},
    )
    return judge(
        LogProbs(values=log_probs),
        {"weight": gradient},
        epsilon=1.2e-7,
        num_layers=3,
    )


@pytest.mark.parametrize("way", JUDGED)
@pytest.mark.parametrize(
    ("tree", "expanded", "passed"),
    [
        ([1.05e-6] * 5, [1e-6] * 5, True),
        ([1.15e-6] * 5, [1e-6] * 5, False),  # 1.15x in every draw: no scatter excuses it
        ([2e-6, 5e-7, 1e-6, 2e-6, 5e-7], [1e-6, 1e-6, 1e-6, 5e-7, 2e-6], True),  # either is better at times
        ([2e-6, 2.1e-6, 1.9e-6, 2.2e-6, 1.8e-6], [1e-6] * 5, False),
        ([5e-6, 1e-6, 9e-6, 4e-6, 5e-6], [1e-6] * 5, False),  # above 4x nothing is excused
        ([3.9e-6], [1e-6], True),  # a single draw shows no scatter
        ([4.1e-6], [1e-6], False),
        ([math.nan] * 5, [1e-6] * 5, False),
        ([math.inf] * 5, [1e-6] * 5, False),
        ([5e-8] * 5, [1e-9] * 5, True),  # below half a rounding of float32
    ],
)
def test_limits_of_gradients(tree, expanded, passed, way):
    """1.1x beyond the scatter of the draws, never above 4x, and roundings are nobody's error."""
    assert verdict_of(way, tree, expanded).passed is passed


@pytest.mark.parametrize("way", JUDGED)
@pytest.mark.parametrize(("error", "passed"), [(1e-7, True), (1e-5, False), (math.nan, False)])
def test_limits_of_log_probs(error, passed, way):
    """Log-probs as far off as the expanded ones pass, a hundred times as far they fail."""
    assert verdict_of(way, [1e-6] * 3, [1e-6] * 3, log_prob_error=error).passed is passed
