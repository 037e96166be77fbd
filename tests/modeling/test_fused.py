"""Fused modules: as stock ones on a tree, exchanged where a GPU runs a plan, and nowhere else.

The GPU's kernels are tested in tests/ops; here the models run through the same forwards on the CPU, with the plain
PyTorch backends, as if it were a GPU.
"""

import dataclasses
from collections import Counter

import pytest
import torch
from support.models import FAMILIES, MOE_FAMILIES, VOCAB, tiny_model
from support.trees import random_trajectories
from torch import nn

from harts_hf import patch, tree_logprobs, unpatch
from harts_hf.modeling import fused, fused_forwards
from harts_hf.modeling.families import FAMILIES as KNOWN
from harts_hf.runtime import RunOptions, window_values
from harts_hf.runtime.window import TreeWindow

# The operation that each forward of fused_forwards runs.
OPERATIONS = {
    fused_forwards.bounded_decays: "decay_gate",
    fused_forwards.centred_norm: "rms_norm",
    fused_forwards.decays: "decay_gate",
    fused_forwards.gated_output_norm: "gated_rms_norm",
    fused_forwards.grouped_experts: "experts",
    fused_forwards.kimi_output_norm: "gated_rms_norm",
    fused_forwards.llama_norm: "rms_norm",
    fused_forwards.mlp: "swiglu",
    fused_forwards.olmo_norm: "rms_norm",
    fused_forwards.router: "route",
}


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU count as a GPU's."""
    monkeypatch.setattr(fused, "fuses", lambda x: getattr(fused._state, "fuses", False))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """How often each operation ran."""
    found: Counter = Counter()

    def counted(name, run):
        def counting(*args, **kwargs):
            found[name] += 1
            return run(*args, **kwargs)

        return counting

    for name in ("rms_norm", "gated_rms_norm", "swiglu", "decay_gate"):
        monkeypatch.setattr(fused_forwards, name, counted(name, getattr(fused_forwards, name)))
    monkeypatch.setattr(fused, "rotate", counted("rotate", fused.rotate))
    experts = fused_forwards.experts
    monkeypatch.setattr(experts, "combine", counted("experts", experts.combine))
    monkeypatch.setattr(experts, "route", counted("route", experts.route))
    return found


def run(model, **options):
    """Log-probs on a tree, and every parameter's gradient."""
    model.zero_grad()
    window = TreeWindow(random_trajectories(3, vocab=VOCAB))
    values = window_values(model, window, ("log_prob",), RunOptions(**options)).rows["log_prob"]
    values.square().sum().backward()
    return [values.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def model_of(family):
    """With the experts that models have on a GPU."""
    model = tiny_model(family)
    if family in MOE_FAMILIES:
        model.set_experts_implementation("grouped_mm")
    return patch(model)


@pytest.mark.parametrize("family", [family for family in FAMILIES if KNOWN[family].fused_modules])
def test_equals_stock_modules(family, as_on_a_gpu, calls):
    """Values and gradients are those of stock modules to 1e-5 of their size (fp32, three layers; the oracle's budget
    for another order of sums), every kind of module took part, and activation checkpointing changes no bit."""
    model = model_of(family)
    plain = run(model, fused_modules=False)
    assert not calls
    together = run(model)
    for ours, theirs in zip(together, plain, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm() + 1e-7
    names = {type(module).__name__ for module in model.modules() if isinstance(module, fused.FusedModule)}
    prefix = KNOWN[family].linear_mixer.removesuffix("DeltaAttention").removesuffix("GatedDeltaNet")
    assert names >= {name for name in KNOWN[family].fused_modules if name.startswith(prefix)}
    expected = {OPERATIONS[forward] for forward in KNOWN[family].fused_modules.values()}
    expected |= {"rotate"} if KNOWN[family].rotary_function is not None else set()
    assert set(calls) == expected
    once = Counter(calls)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for ours, theirs in zip(run(model), together, strict=True):
        assert torch.equal(ours, theirs)
    # Layers run twice, the last norm behind them once.
    in_layers = expected - {"rms_norm"}
    assert all(calls[name] == 3 * once[name] for name in in_layers) and calls["rms_norm"] >= 2 * once["rms_norm"]


@pytest.mark.parametrize("family", FAMILIES)
def test_stock_on_the_cpu(family, calls):
    """Tensors of the CPU go through stock modules, bit for bit."""
    model = model_of(family)
    for ours, theirs in zip(run(model), run(model, fused_modules=False), strict=True):
        assert torch.equal(ours, theirs)
    assert not calls


def test_stock_without_a_plan(as_on_a_gpu, calls):
    """A call without a plan computes as stock does also where a GPU would fuse, during a plan's run on another thread
    or after one."""
    model = model_of("bailing_hybrid")
    ids = torch.arange(2, 40)[None]
    expected = unpatch(model)(ids).logits
    patch(model)
    tree_logprobs(model, random_trajectories(0, vocab=VOCAB))
    calls.clear()
    assert torch.equal(model(ids).logits, expected) and not calls


def test_leaves_what_it_is_not_for():
    """Other activations, and modules whose forward was replaced, stay stock."""
    model = tiny_model("bailing_hybrid")
    model.model.layers[0].mlp.act_fn = nn.GELU()
    model.model.layers[1].mlp.experts.act_fn = nn.GELU()
    model.model.norm.forward = model.model.norm.forward
    before = [type(module) for module in (model.model.layers[0].mlp, model.model.layers[1].mlp.experts)]
    patch(model)
    assert [type(m) for m in (model.model.layers[0].mlp, model.model.layers[1].mlp.experts)] == before
    assert not isinstance(model.model.norm, fused.FusedModule)
    assert isinstance(model.model.layers[2].mlp.experts, fused.FusedModule)


def test_an_entry_says_what_is_fused():
    """Also one of a user's own: its classes and no others, beside the layers that tell them."""
    entry = dataclasses.replace(KNOWN["olmo_hybrid"], fused_modules={"OlmoHybridMLP": fused_forwards.mlp})
    found = fused.find_fused(tiny_model("olmo_hybrid"), entry)
    layers = {"OlmoHybridAttentionDecoderLayer", "OlmoHybridLinearAttentionDecoderLayer"}
    assert {type(module).__name__ for module, _ in found} == {"OlmoHybridMLP", *layers}


def test_other_experts_stay(as_on_a_gpu, calls):
    """Experts that a user set to another implementation run as it says."""
    model = model_of("bailing_hybrid")
    model.set_experts_implementation("batched_mm")
    run(model)
    assert "experts" not in calls and calls["rms_norm"]


def test_unpatching_what_was_put_over_it():
    """A class over an exchanged one (FSDP2's) is not dropped in silence."""
    model = patch(tiny_model("qwen3_5_text"))
    layer = model.model.layers[0]
    layer.__class__ = type("Sharded", (type(layer),), {})
    with pytest.raises(ValueError, match=r"expected the class that patch gave a Sharded, got one that was put over"):
        unpatch(model)
