"""A model that is changed between a window's forwards and backwards is an error, in every execution and mode."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.models import VOCAB, tiny_model
from support.trees import branching
from torch import nn

from harts_hf import PlannerConfig, UnsupportedModelError, patch, tree_logprobs, unpatch
from harts_hf.runtime import ModelChangedError, TreeValues, TreeWindow, WindowRun

EXECUTIONS = ["replay", "nested", "keep"]


def window_of(execution, budget=64):
    """Several microbatches of one tree, or one with a large budget."""
    planner = PlannerConfig(max_tokens_per_microbatch=budget, sharing="always", execution=execution)
    return TreeWindow(branching(65, vocab=VOCAB), planner)


def scored(execution="replay", model=None, **options):
    """A model and a run of it that has scored its window."""
    model = patch(tiny_model("qwen3_5_text") if model is None else model)
    window = window_of(execution)
    run = WindowRun(model, window, **options)
    run.score()
    return model, run, TreeValues(rows={"log_prob": torch.ones(window.tree.num_tokens)})


def optimizer_step(model):
    """One step of Adam."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.Adam(model.parameters(), lr=1e-6).step()


def load_state_dict(model):
    """Weights of another seed."""
    model.load_state_dict(tiny_model("qwen3_5_text", seed=5).state_dict())


def other_storage(model):
    """p.data = ..., which no counter of autograd sees."""
    model.model.layers[1].mlp.up_proj.weight.data = torch.zeros_like(model.model.layers[1].mlp.up_proj.weight)


def past_autograd(model):
    """p.data.mul_(), which neither counters nor addresses show."""
    model.model.norm.weight.data.mul_(1.01)


def other_parameter(model):
    """A module whose parameter object is another one."""
    model.model.norm.weight = nn.Parameter(model.model.norm.weight.detach().clone())


def other_module(model):
    """A layer exchanged for one with the same parameter."""
    other = type(model.model.norm)(32)
    other.weight = model.model.norm.weight
    model.model.norm = other


def frozen(model):
    """A parameter that would get no gradient any more."""
    model.model.norm.weight.requires_grad_(False)


def adapter_injected(model):
    """LoRA layers put into the model."""
    get_peft_model(model, LoraConfig(target_modules=["up_proj"], task_type="CAUSAL_LM"))


def a_buffer(model):
    """The rotary frequencies."""
    model.model.rotary_emb.inv_freq.data.mul_(2)


CHANGES = {
    optimizer_step: "was changed in place",
    load_state_dict: "was changed in place",
    other_storage: r"layers\.1\.mlp\.up_proj\.weight was given other storage",
    past_autograd: r"values of model\.norm\.weight were replaced",
    other_parameter: "has other parameters",
    other_module: "RMSNorm was replaced by another module",
    frozen: r"requires_grad of model\.norm\.weight was set to False",
    adapter_injected: "requires_grad of|modules instead of",
    a_buffer: "inv_freq were replaced",
    unpatch: r"its class changed \(patch, unpatch\)",
}


@pytest.mark.parametrize(
    "execution", [EXECUTIONS[0], *(pytest.param(one, marks=pytest.mark.exhaustive) for one in EXECUTIONS[1:])]
)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_change_between_score_and_backward(change, execution):
    """What changed is named, before anything is added to a gradient."""
    model, run, coefficients = scored(execution)
    change(model)
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    with pytest.raises(ModelChangedError, match=CHANGES[change]):
        run.backward(coefficients, torch.Tensor.backward)
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        assert parameter.grad is gradient or torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize("change", [optimizer_step, other_storage, past_autograd, unpatch])
def test_one_microbatch(change):
    """A window without any handoff is watched too."""
    model = patch(tiny_model("qwen3_5_text"))
    window = window_of("replay", budget=4096)
    run = WindowRun(model, window)
    run.score()
    change(model)
    with pytest.raises(ModelChangedError):
        run.backward(TreeValues(rows={"log_prob": torch.ones(window.tree.num_tokens)}), torch.Tensor.backward)


@pytest.mark.parametrize(
    ("execution", "mode"), [("replay", "train"), ("nested", "train"), ("keep", "train"), ("nested", "unscored")]
)
def test_a_step_inside_the_backward(execution, mode):
    """An optimizer that steps after each microbatch's backward, as fused ones do, is found at the next op."""
    model, window = patch(tiny_model("qwen3_5_text")), window_of(execution)
    run = WindowRun(model, window, mode=mode)
    coefficients = TreeValues(rows={"log_prob": torch.ones(window.tree.num_tokens)})
    calls = []

    def backward(scalar):
        calls.append(scalar)
        scalar.backward()
        optimizer_step(model)

    # In "keep" and "nested" autograd's own check of what a graph has saved may come first.
    with pytest.raises(RuntimeError, match="was changed in place"):
        if mode == "train":
            run.score()
            run.backward(coefficients, backward)
        else:
            wanted = {"log_prob": torch.ones(window.tree.num_tokens, dtype=torch.bool)}
            run.backward_unscored(coefficients, wanted, backward)
    assert len(calls) == 1


def test_tree_logprobs():
    """The differentiable function is the same run."""
    model = tiny_model("qwen3_5_text")
    planner = PlannerConfig(max_tokens_per_microbatch=64, sharing="always")
    total = sum(value.sum() for value in tree_logprobs(model, branching(65, vocab=VOCAB), planner))
    past_autograd(model)
    with pytest.raises(ModelChangedError, match=r"values of model\.norm\.weight"):
        total.backward()


def lora(**options):
    """A model with two adapters."""
    config = LoraConfig(target_modules=["up_proj"], task_type="CAUSAL_LM", **options)
    model = get_peft_model(tiny_model("qwen3_5_text"), config, adapter_name="first")
    model.add_adapter("second", config)
    model.set_adapter("first")
    return model


def with_nonzero_adapter():
    """LoRA whose product is not zero, so that merging changes weights."""
    model = lora(init_lora_weights=False)
    return model


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.set_adapter("second"),
        lambda model: model.disable_adapter_layers(),
        lambda model: model.merge_adapter(),
        lambda model: model.delete_adapter("first"),
    ],
    ids=["other", "disabled", "merged", "deleted"],
)
def test_adapters(change):
    """Another adapter, none, one merged into the weights."""
    model, run, coefficients = scored(model=with_nonzero_adapter())
    change(model)
    with pytest.raises(ModelChangedError):
        run.backward(coefficients, torch.Tensor.backward)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_what_is_no_change(execution):
    """train() and eval(), gradients, and a look at the weights: nothing that a dropout-free forward depends on."""
    model, run, coefficients = scored(execution)
    run.backward(coefficients, torch.Tensor.backward)
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    again = WindowRun(model, window_of(execution))
    again.score()
    model.eval()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    model.state_dict()
    model(input_ids=torch.tensor([[1, 2, 3]]))
    again.backward(coefficients, torch.Tensor.backward)
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))


def test_a_forward_may_count():
    """A module that counts its tokens in a buffer, as routers do, changes no gradient."""
    model = patch(tiny_model("qwen3_5_text"))
    norm = model.model.norm
    norm.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=False)
    norm.register_buffer("load", torch.zeros(4))

    def count(module, inputs, output):
        module.seen += output.shape[-2]
        module.load += 1

    norm.register_forward_hook(count)
    model, run, coefficients = scored(model=model)
    run.backward(coefficients, torch.Tensor.backward)
    assert norm.seen > 0


def test_dropout_after_patching():
    """A dropout that was switched on after patching would make train() and eval() matter: refused by the forward."""
    model = patch(tiny_model("qwen3_5_text"))
    model.model.layers[1].mlp.extra = nn.Dropout(0.1)
    with pytest.raises(UnsupportedModelError, match=r"dropout 0 everywhere, got .*extra = 0\.1"):
        WindowRun(model, window_of("replay")).score()


def test_order_of_calls():
    """A run scores once, then runs one backward; what would leave gradients out, or add them twice, says so."""
    model, window = patch(tiny_model("qwen3_5_text")), window_of("replay", budget=4096)
    coefficients = TreeValues(rows={"log_prob": torch.ones(window.tree.num_tokens)})
    wanted = {"log_prob": torch.ones(window.tree.num_tokens, dtype=torch.bool)}
    run = WindowRun(model, window)
    with pytest.raises(RuntimeError, match=r"score\(\) before backward"):
        run.backward(coefficients, torch.Tensor.backward)
    run.score()
    with pytest.raises(RuntimeError, match="score a second time"):
        run.score()
    with pytest.raises(RuntimeError, match="mode unscored for this, got 'train'"):
        run.backward_unscored(coefficients, wanted, torch.Tensor.backward)
    run.backward(coefficients, torch.Tensor.backward)
    with pytest.raises(RuntimeError, match="backward a second time"):
        run.backward(coefficients, torch.Tensor.backward)
    only_scores = WindowRun(model, window, mode="score")
    only_scores.score()
    with pytest.raises(RuntimeError, match="mode train for this, got 'score'"):
        only_scores.backward(coefficients, torch.Tensor.backward)
    with pytest.raises(RuntimeError, match="mode train or score for this, got 'unscored'"):
        WindowRun(model, window, mode="unscored").score()


@pytest.mark.exhaustive
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_two_runs_of_one_window(execution):
    """Runs of two models on one window, their ops between one another: each hands over its own states."""
    models = [patch(tiny_model("qwen3_5_text", dtype=torch.float64, seed=seed)) for seed in (0, 1)]
    for model in models:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    expected = []
    for model in models:
        window = window_of(execution)
        run = WindowRun(model, window)
        run.score()
        coefficients = TreeValues(rows={"log_prob": torch.ones(window.tree.num_tokens, dtype=torch.float64)})
        run.backward(coefficients, torch.Tensor.backward)
        expected.append([parameter.grad.clone() for parameter in model.parameters()])
        model.zero_grad()
    window = window_of(execution)
    runs = [WindowRun(model, window) for model in models]
    for run in runs:
        run.score()
    for run in runs:
        run.backward(coefficients, torch.Tensor.backward)
    for model, gradients in zip(models, expected, strict=True):
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))


def test_adapters_of_parameters_are_no_change():
    """PEFT sets a router's parameter to itself in each forward, which autograd counts as a change in place."""
    config = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(tiny_model("qwen3_next"), config)
    assert any(type(module).__name__ == "ParamWrapper" for module in model.modules())
    model, run, coefficients = scored(model=model)
    run.backward(coefficients, torch.Tensor.backward)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    "targets",
    [["experts.gate_up_proj"], ["experts.gate_up_proj", "experts.down_proj"], ["gate.weight"]],
    ids=["one", "nested", "router"],
)
def test_adapters_of_experts_are_no_change_in_the_first_window(targets):
    """PEFT registers an adapted parameter anew in each forward, behind those of its module that it does not adapt.

    Two parameters of a module have a wrapper within a wrapper; a router's weight is a bare parameter.
    """
    parameters = [f"mlp.{target}" for target in targets]
    config = LoraConfig(target_modules=["q_proj"], target_parameters=parameters, init_lora_weights=False)
    model = get_peft_model(tiny_model("qwen3_next"), config)
    before = [name for name, _ in model.named_parameters()]
    sum(value.sum() for value in tree_logprobs(model, branching(65, vocab=VOCAB))).backward()
    after = [name for name, _ in model.named_parameters()]
    assert sorted(before) == sorted(after)
    assert before != after or targets != ["experts.gate_up_proj"]  # what the first window is about
    for name, parameter in model.named_parameters():
        assert not parameter.requires_grad or parameter.grad.abs().max() > 0, name
