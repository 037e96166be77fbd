"""patch and unpatch: per instance, reversible, and bit for bit stock without a plan."""

import copy
import inspect
import pickle
from types import SimpleNamespace

import pytest
import torch
from support.models import FAMILIES, VOCAB, tiny_model
from support.trees import random_trajectories
from transformers.integrations import hub_kernels

from harts_hf import UnsupportedModelError, patch, tree_logprobs, unpatch
from harts_hf.modeling import is_patched
from harts_hf.modeling.families import FAMILIES as KNOWN


def batch(model):
    """Two padded rows and their mask."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(2, VOCAB, (2, 90), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :17] = 0
    return {"input_ids": ids, "attention_mask": mask}


def outputs(model):
    """Logits, a loss with gradients, and greedily generated tokens and their scores with a cache."""
    model.zero_grad()
    inputs = batch(model)
    out = model(**inputs, labels=inputs["input_ids"])
    out.loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.eval()
    shapes = []
    watch = model.get_output_embeddings().register_forward_hook(lambda head, given, out: shapes.append(out.shape))
    with torch.no_grad():
        generated = model.generate(
            **inputs, max_new_tokens=6, do_sample=False, output_scores=True, return_dict_in_generate=True
        )
    watch.remove()
    model.train()
    assert shapes[0][1] == 1, "the prompt's logits are not needed"
    return [out.logits.detach(), generated.sequences, *generated.scores, *gradients]


def assert_bitwise(got, expected):
    """Equal to the last bit."""
    assert len(got) == len(expected)
    for value, reference in zip(got, expected, strict=True):
        assert torch.equal(value, reference)


@pytest.mark.parametrize("family", FAMILIES)
def test_stock_without_a_plan(family):
    """A patched model, and an unpatched one after tree use, computes and generates as stock does, bit for bit."""
    model = tiny_model(family)
    names = [name for name, _ in model.named_parameters()]
    classes = [type(module) for module in model.modules()]
    expected = outputs(model)
    assert patch(model) is model and is_patched(model)
    assert_bitwise(outputs(model), expected)
    assert [name for name, _ in model.named_parameters()] == names
    tree_logprobs(model, random_trajectories(0, vocab=VOCAB))[0].sum().backward()
    assert unpatch(model) is model and not is_patched(model)
    assert [type(module) for module in model.modules()] == classes
    assert "forward" not in vars(model)
    assert_bitwise(outputs(model), expected)


def test_patching_is_per_instance():
    """Another model of the same class stays stock."""
    first, second = tiny_model("qwen3_5_text"), tiny_model("qwen3_5_text")
    patch(first)
    assert not is_patched(second)
    assert type(second.model.layers[0].linear_attn) is KNOWN["qwen3_5_text"].class_named("Qwen3_5GatedDeltaNet")
    with pytest.raises(ValueError, match=r"expected a class of transformers.* for qwen3_5_text, got 'Qwen3_5'"):
        KNOWN["qwen3_5_text"].class_named("Qwen3_5")


def test_every_family_is_tested():
    """A family of this package has a tiny model, and so is in every test that runs once per family."""
    assert {name for name, family in KNOWN.items() if "." not in family.module_name} == set(FAMILIES)


def test_patching_twice_is_patching_once():
    """A second patch changes nothing, and one unpatch undoes both."""
    model = tiny_model("qwen3_5_text")
    forward = patch(model).forward
    assert patch(model).forward == forward
    assert not is_patched(unpatch(model))
    unpatch(model)


def test_a_forward_of_the_instance_is_kept():
    """TRL installs a forward on the instance before us: it runs without a plan, and is back after unpatch."""
    model = tiny_model("qwen3_5_text")
    stock = model.forward
    model.forward = lambda *args, **kwargs: ("trl", stock(*args, **kwargs))
    own = model.forward
    patch(model)
    assert model(**batch(model))[0] == "trl"
    assert unpatch(model).forward is own


def test_unpatch_refuses_another_forward():
    """Something installed over ours has to go first; nothing is torn out silently."""
    model = patch(tiny_model("qwen3_5_text"))
    ours = model.forward
    model.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    with pytest.raises(ValueError, match="expected the forward that patch installed on Qwen3_5ForCausalLM"):
        unpatch(model)


def test_signature_is_stock():
    """What Transformers reads from a forward's parameters, such as whether it takes logits_to_keep, stays true."""
    model = tiny_model("qwen3_5_text")
    stock = inspect.signature(model.forward).parameters
    patched = inspect.signature(patch(model).forward).parameters
    assert [name for name in patched if not name.startswith("harts")] == list(stock)
    assert model._supports_logits_to_keep()


def test_a_new_head_is_an_error_until_patched_again():
    """resize_token_embeddings replaces the head that was patched: said, and mended by unpatch and patch."""
    model = patch(tiny_model("qwen3_5_text"))
    rows = random_trajectories(1, vocab=VOCAB)
    model.resize_token_embeddings(VOCAB + 8)
    for use in (lambda: tree_logprobs(model, rows), lambda: patch(model)):
        with pytest.raises(UnsupportedModelError, match="the output head that was patched"):
            use()
    assert "forward" not in vars(unpatch(model))
    assert all(value.isfinite().all() for value in tree_logprobs(model, rows))


@pytest.mark.parametrize("family", FAMILIES)
def test_no_advice_to_install_kernels_of_gpus(family, monkeypatch):
    """On a CPU Transformers' dispatcher, which warns, is passed by, but for packed rows; no bit moves."""
    said = []
    monkeypatch.setattr(hub_kernels, "logger", SimpleNamespace(warning_once=said.append))
    model, ids = tiny_model(family).eval(), torch.arange(2, 40)[None]
    options = {"max_new_tokens": 3, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected = torch.cat(model.generate(ids, **options).logits)
    assert len(set(said)) == 4
    patch(model)
    said.clear()
    assert torch.equal(torch.cat(model.generate(ids, **options).logits), expected) and not said
    if family == "qwen3_5_text":
        with pytest.raises(ValueError, match="can't keep packed sequences apart"):
            model.model.layers[0].linear_attn(torch.zeros(1, 4, 32), cu_seq_lens_q=torch.tensor([0, 2, 4]))


def test_deep_copies_are_independent():
    """A copy of a patched model computes with its own parameters; pickling says what to do."""
    model = patch(tiny_model("qwen3_5_text"))
    assert vars(copy.copy(model.model.layers[0])) == vars(model.model.layers[0])
    with pytest.raises(pickle.PicklingError, match=r"patched one: save it with save_pretrained, or .*unpatch first"):
        pickle.dumps(model)
    clone = copy.deepcopy(model)
    rows = random_trajectories(1, vocab=VOCAB)
    with torch.no_grad():
        before = tree_logprobs(clone, rows)[0]
        for parameter in model.parameters():
            parameter.zero_()
        assert torch.equal(tree_logprobs(clone, rows)[0], before)
        assert not torch.equal(tree_logprobs(model, rows)[0], before)
    pickle.dumps(unpatch(model))


def test_kimi_full_attention_is_not_taken_for_linear():
    """The class-name trap: KimiLinearAttention is the full attention of kimi_linear."""
    model = patch(tiny_model("kimi_linear"))
    kinds = [type(layer.self_attn).stock.__name__ for layer in model.model.layers]
    assert kinds == ["KimiLinearDeltaAttention", "KimiLinearAttention", "KimiLinearDeltaAttention"]


def test_checkpoint_is_plain(tmp_path):
    """What a patched model saves is loaded by the stock class, equal in every tensor."""
    model = patch(tiny_model("bailing_hybrid"))
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    for (name, value), (other, reference) in zip(loaded.state_dict().items(), model.state_dict().items(), strict=True):
        assert name == other and torch.equal(value, reference)
