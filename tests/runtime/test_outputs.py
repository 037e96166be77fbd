"""Outputs beside log-probs: a value head on every row, a router's sums; against the unpatched model in float64."""

from functools import cache
from itertools import product

import pytest
import torch
from support.models import FAMILIES, VOCAB, tiny_model
from support.oracle import assert_gradients_close, float64_everywhere, gradients, random_weights, trajectory_log_probs
from support.parity import GRADIENT_TOLERANCE, assert_values_close
from support.ranks import OtherRankHas
from support.trees import branching, random_trajectories
from torch import nn

from harts_hf import PlannerConfig, patch, unpatch
from harts_hf.modeling import LABEL_VALUES, RowValue, Sum, add_output
from harts_hf.runtime import TreeValues, TreeWindow, WindowRun, window_values

EXECUTIONS = ["replay", "nested", "keep"]
VALUE = RowValue(name="value", module="critic")
ROUTER = Sum(
    name="router",
    # [layers, experts]: probabilities summed over the trajectories' tokens
    compute=lambda output, tree_pass: torch.stack(
        [tree_pass.batch.occurrence_counts.double() @ logits.double().softmax(-1) for logits in output.router_logits]
    )[:, 0],
    base_arguments={"output_router_logits": True},
)


def rows():
    """A tree that needs several trunks, with trajectories that end inside others."""
    return branching(65, vocab=VOCAB) + random_trajectories(3, vocab=VOCAB, count=4)


def planner(execution):
    """Everything shared, in microbatches of 64 rows."""
    return PlannerConfig(max_tokens_per_microbatch=64, sharing="always", execution=execution)


def stock(family):
    """A float64 model with a value head, the same at each call."""
    model = tiny_model(family, dtype=torch.float64)
    model.critic = nn.Linear(model.config.hidden_size, 1, dtype=torch.float64)
    return model


def with_critic(family, *outputs):
    """That model, patched."""
    model = patch(stock(family))
    for output in outputs:
        add_output(model, output)
    return model


def value_weights(trajectories):
    """[L] each: of every token, the first and the last included."""
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(len(row), generator=generator, dtype=torch.float64) for row in trajectories]


@cache
def values_of_trajectories(family):
    """Values of :func:`rows` one at a time by the unpatched model, and the gradients of their weighed sum."""
    model, trajectories, values = stock(family), rows(), []
    pairs = zip(random_weights(trajectories, torch.float64), value_weights(trajectories), strict=True)
    with float64_everywhere(model):
        for row, (weight, of_value) in zip(trajectories, pairs, strict=True):
            hidden = model.model(input_ids=torch.from_numpy(row)[None], use_cache=False).last_hidden_state[0]
            value = model.critic(hidden)[:, 0]
            ((trajectory_log_probs(model, row) * weight).sum() + (value * of_value).sum()).backward()
            values.append(value.detach())
    return values, gradients(model)


@pytest.mark.essential("qwen3_5_text-replay-False")
@pytest.mark.parametrize(
    ("family", "execution", "checkpointing"),
    [(*run, number % 2 == 1) for number, run in enumerate(product(["qwen3_5_text", "bailing_hybrid"], EXECUTIONS))],
)
def test_values_of_rows(family, execution, checkpointing):
    """A critic's value of every row, leaves too, and every gradient of log-probs and values together."""
    model, trajectories = with_critic(family, VALUE), rows()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    weights, of_values = random_weights(trajectories, torch.float64), value_weights(trajectories)
    with float64_everywhere(model):
        window = TreeWindow(trajectories, planner(execution))
        found = window_values(model, window, ("log_prob", "value")).rows
        paths = [torch.from_numpy(window.tree.path(i)) for i in range(len(trajectories))]
        values = [found["value"][path] for path in paths]
        log_probs = [found["log_prob"][path[1:]] for path in paths]
        pairs = [*zip(log_probs, weights, strict=True), *zip(values, of_values, strict=True)]
        sum((value * weight).sum() for value, weight in pairs).backward()
    expected_values, expected = values_of_trajectories(family)
    assert_values_close("values", values, expected_values)
    assert_gradients_close(gradients(model), expected, GRADIENT_TOLERANCE)


def router_weights(like):
    """Of the sums, of their shape."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@cache
def sums_of_trajectories(family):
    """A router's probabilities summed over :func:`rows`, one at a time by the unpatched model; gradients."""
    model, total = stock(family), 0
    with float64_everywhere(model):
        for row in rows():
            ids = torch.from_numpy(row)[None]
            logits = model.model(input_ids=ids, use_cache=False, output_router_logits=True).router_logits
            one = torch.stack([layer.double().softmax(-1).sum(0) for layer in logits])
            (one * router_weights(one)).sum().backward()
            total = total + one.detach()
    return total, gradients(model)


@pytest.mark.essential("nested")
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_sums(execution):
    """A router's probabilities summed over all trajectories, whatever the cut, and their gradients."""
    model, trajectories = with_critic("qwen3_next", ROUTER), rows()
    model.set_experts_implementation("eager")
    with float64_everywhere(model):
        window = TreeWindow(trajectories, planner(execution))
        total = window_values(model, window, ("log_prob", "router")).sums["router"]
        (total * router_weights(total)).sum().backward()
    expected_total, expected = sums_of_trajectories("qwen3_next")
    assert_values_close("sums", [total], [expected_total])
    assert_gradients_close(gradients(model), expected, GRADIENT_TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_backward_touches_every_parameter(family):
    """Microbatches that nothing is asked of, and dummies, are connected to the head, the critic and the routers.

    DDP and ZeRO wait for every parameter, FSDP2 hooks what a forward returns: an output that is missing would hang
    them or leave gradients out.
    """
    has_router = hasattr(tiny_model(family).config, "router_aux_loss_coef")
    model = with_critic(family, VALUE, *([ROUTER] if has_router else []))
    names = (*LABEL_VALUES, "value", *(["router"] if has_router else []))
    window = TreeWindow(rows(), planner("replay"))
    parameters = dict(model.named_parameters())
    touched, outputs = [], []
    model.register_forward_hook(lambda module, inputs, output: outputs.append(output))

    def backward(scalar):
        found = torch.autograd.grad(scalar, list(parameters.values()), retain_graph=True, allow_unused=True)
        touched.append({name for name, gradient in zip(parameters, found, strict=True) if gradient is not None})
        scalar.backward()

    run = WindowRun(model, window, ranks=OtherRankHas(12))
    scores = run.score(names)
    nothing = TreeValues(
        rows={name: torch.zeros_like(value) for name, value in scores.rows.items()},
        sums={name: torch.zeros_like(value) for name, value in scores.sums.items()},
    )
    nothing.rows["log_prob"][window.batches[0].labels.tree_rows] = 1.0  # all others score nothing
    run.backward(nothing, backward)
    assert len(touched) == 12 > len(window.batches)
    for found in touched:
        assert found == set(parameters)
    for output in outputs:
        assert {kind: tuple(values) for kind, values in output.items()} == {
            "rows": (*LABEL_VALUES, "value"),
            "sums": names[3:],
        }
        assert all(type(value) is torch.Tensor for values in output.values() for value in values.values())


def test_names_that_are_taken_or_missing():
    """An output is named once, of a module that is there, on a patched model; a run asks for names that there are."""
    model = with_critic("qwen3_5_text", VALUE)
    for name in ("value", "log_prob"):
        with pytest.raises(ValueError, match=f"new name of an output, got '{name}'"):
            add_output(model, RowValue(name=name, module="critic"))
    with pytest.raises(ValueError, match="a module 'actor' in Qwen3_5ForCausalLM for the value 'other', got none"):
        add_output(model, RowValue(name="other", module="actor"))
    window = TreeWindow(rows())
    with pytest.raises(ValueError, match="outputs among log_prob, entropy, is_top1, value, got reward"):
        window_values(model, window, ("log_prob", "reward"))
    unpatch(model)
    with pytest.raises(ValueError, match="expected a patched model"):
        add_output(model, VALUE)
    with pytest.raises(ValueError, match="outputs among log_prob, entropy, is_top1, got value"):
        window_values(patch(model), window, ("value",))


def test_critics_of_another_dtype_or_shape():
    """A critic may be kept in float32 beside a bfloat16 model; one that gives no number per row is named."""
    model = tiny_model("qwen3_5_text", dtype=torch.bfloat16)
    model.critic = nn.Linear(model.config.hidden_size, 1)
    model.wide = nn.Linear(model.config.hidden_size, 2)
    patch(model)
    add_output(model, VALUE)
    window = TreeWindow(rows(), planner("replay"))
    values = window_values(model, window, ("value",)).rows["value"]
    values.sum().backward()
    assert values.dtype == torch.float32 and model.critic.weight.grad.dtype == torch.float32
    add_output(model, RowValue(name="other", module="wide"))
    with pytest.raises(ValueError, match=r"expected wide to give \d+ numbers for other, got \(\d+, 2\)"):
        window_values(model, window, ("other",))


def test_sums_of_another_shape():
    """A sum whose shape depends on the microbatch would be added up wrongly."""
    model = with_critic("qwen3_5_text")
    add_output(model, Sum(name="rows", compute=lambda output, _: output.last_hidden_state[0, :, 0]))
    with pytest.raises(ValueError, match="the sum 'rows' to have one shape, got"):
        window_values(model, TreeWindow(rows(), planner("replay")), ("log_prob", "rows"))
