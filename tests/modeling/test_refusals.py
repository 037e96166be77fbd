"""What would be computed wrongly is refused, by name, before anything runs."""

import pytest
import torch
import transformers
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from support.models import FAMILIES, MOE_FAMILIES, VOCAB, tiny_model
from support.oracle import assert_gradients_close, float64_everywhere, gradients, random_weights, trajectory_log_probs
from support.trees import random_trajectories
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.distributed import DistributedConfig

from harts_hf import UnsupportedModelError, patch, tree_logprobs
from harts_hf.modeling import checks, is_patched


def refused(model, message):
    """patch raises, names the reason, and leaves the model stock."""
    with pytest.raises(UnsupportedModelError, match=message):
        patch(model)
    assert not any(hasattr(type(module), "stock") for module in model.modules())


def test_unknown_family():
    """A model without linear attention says which families are known."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    refused(AutoModelForCausalLM.from_config(config), "bailing_hybrid.*got LlamaForCausalLM with model_type 'llama'")


def test_vision_model():
    """The multimodal wrapper is refused with the way out."""
    text = tiny_model("qwen3_5_text").config.to_dict()
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=vision)
    model = transformers.Qwen3_5ForConditionalGeneration._from_config(config)
    refused(model, "text-only.*qwen3_5_text")


@pytest.mark.parametrize("layer", ["sliding_attention", "lightning_attention", "mamba"])
def test_layer_types(layer):
    """Sliding windows, lightning attention and Mamba are named."""
    model = tiny_model("qwen3_5_text")
    model.config.layer_types = ["linear_attention", layer, "linear_attention"]
    refused(model, layer)


@pytest.mark.parametrize(
    ("family", "key"), [("qwen3_5_text", "linear_conv_kernel_dim"), ("olmo_hybrid", "linear_conv_kernel_dim")]
)
def test_wide_convolutions(family, key):
    """Three ancestors are handed over, so four taps are the most."""
    refused(tiny_model(family, **{key: 5}), "convolutions of at most 4 taps, got 5 in model.layers.0")


@pytest.mark.parametrize("family", FAMILIES)
def test_activations_of_convolutions(family):
    """The kernel knows SiLU; a convolution's activation is that of the MLPs."""
    refused(tiny_model(family, hidden_act="gelu"), r"one of None, silu, swish, got gelu in model.layers.0.*hidden_act")
    patch(tiny_model(family, hidden_act="swish"))


def test_lightning_layers_of_ling_2_6():
    """Ling-2.6 has Ling-3.0's model_type; keys that only lightning layers have tell them apart."""
    refused(tiny_model("bailing_hybrid", group_norm_size=4, linear_silu=True), "lightning attention.*Ling-2.6")


def test_no_linear_layer():
    """A model of full attention only is none of ours."""
    model = tiny_model("qwen3_5_text")
    model.config.layer_types = ["full_attention"] * 3
    refused(model, "at least one linear_attention layer")


def test_mixers_that_do_not_match_the_configuration():
    """Layers that the configuration announces and the model lacks are noticed."""
    model = tiny_model("qwen3_5_text")
    model.model.layers[0].linear_attn = torch.nn.Identity()
    refused(model, "expected 3 token mixers.*found 2")


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_batch_dependent_rope(kind):
    """Frequencies that follow the longest position would differ between tree and trajectory."""
    model = tiny_model("bailing_hybrid")
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": kind}
    refused(model, kind)


def test_scaled_logits():
    """Logit transforms that no supported family has are not applied, so they are refused."""
    model = tiny_model("qwen3_5_text")
    model.config.final_logit_softcapping = 30.0
    refused(model, "final_logit_softcapping=30.0")


def test_dropout():
    """Attention dropout in the configuration, and a dropout module of an adapter."""
    refused(tiny_model("qwen3_5_text", attention_dropout=0.1), "config.attention_dropout = 0.1")
    lora = LoraConfig(target_modules=["out_proj"], lora_dropout=0.1)
    model = get_peft_model(tiny_model("qwen3_5_text"), lora)
    refused(model, "lora_dropout.* = 0.1")


def test_half_precision():
    """fp16 states would overflow."""
    refused(tiny_model("qwen3_5_text").half(), "float16")


def test_adapter_on_the_head():
    """The head's weight is read without calling its adapter."""
    model = get_peft_model(tiny_model("qwen3_5_text"), LoraConfig(target_modules=["lm_head"]))
    refused(model, "plain nn.Linear as the language-model head")


def test_prompt_learning():
    """Virtual tokens would shift every position."""
    model = get_peft_model(tiny_model("qwen3_5_text"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    refused(model, "PROMPT_TUNING")


def test_wrappers():
    """Compiled models and DataParallel are refused."""
    refused(torch.compile(tiny_model("qwen3_5_text")), "torch.compile")
    refused(torch.nn.DataParallel(tiny_model("qwen3_5_text")), "DataParallel")


def test_replaced_forward_of_a_mixer():
    """Another patch on a mixer instance would run in our place."""
    model = tiny_model("qwen3_5_text")
    mixer = model.model.layers[0].linear_attn
    mixer.forward = mixer.forward
    refused(model, "a replaced one on Qwen3_5GatedDeltaNet")


def test_transformers_version(monkeypatch):
    """A Transformers release that was not tested."""
    # Transformers puts another module in its own place, so that `transformers` may be two objects.
    monkeypatch.setattr(checks.transformers, "__version__", "5.25.0")
    refused(tiny_model("qwen3_5_text"), "transformers >= 5.24, < 5.25.*got 5.25.0")


def test_reentrant_checkpointing():
    """Refused at the first forward, when it is known to be on."""
    model = tiny_model("qwen3_5_text")
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(
        UnsupportedModelError, match=r"use_reentrant=True.*adapters under ZeRO-3.*activation_checkpointing=False"
    ):
        tree_logprobs(model, random_trajectories(0, vocab=VOCAB))


@pytest.fixture
def one_process():
    """A process group of one."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("dims", "kind"),
    [(("tp",), "tensor"), (("dp", "tp"), "tensor"), (("dp_shard_cp",), "context"), (None, "tensor")],
)
def test_tensor_and_context_parallelism(one_process, dims, kind):
    """Weights that are split over processes, by the dimensions of their mesh or without FSDP."""
    mesh = init_device_mesh("cpu", (1,) * len(dims or ("",)), mesh_dim_names=dims)
    model = tiny_model("qwen3_5_text")
    linear = model.model.layers[1].mlp.up_proj
    linear.weight = torch.nn.Parameter(distribute_tensor(linear.weight.detach(), mesh))
    refused(model, rf"mlp\.up_proj\.weight on a device mesh.*{kind} parallelism is not supported")


@pytest.mark.parametrize("dims", [None, ("dp",), ("dp_replicate", "dp_shard")])
def test_data_parallelism_is_no_split(one_process, dims):
    """FSDP2's shards are gathered before they are read."""
    model = tiny_model("qwen3_5_text")
    fully_shard(model, mesh=init_device_mesh("cpu", (1,) * len(dims or ("",)), mesh_dim_names=dims))
    patch(model)


@pytest.mark.parametrize(("sizes", "kind"), [({"tp_size": 2}, "tensor"), ({"pp_size": 2}, "pipeline")])
def test_parallelism_of_from_pretrained(sizes, kind):
    """What Transformers notes on a model that it has loaded in parts."""
    model = tiny_model("qwen3_5_text")
    model._device_mesh, model.config.distributed_config = object(), DistributedConfig(**sizes)
    refused(model, f"data parallelism only.*got {kind} parallelism over 2 processes")
    with pytest.raises(UnsupportedModelError, match="got context parallelism over 4 processes"):
        checks.check_parallel_sizes({"tensor": 1, "sequence": None, "context": 4})


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("bailing_hybrid", {"fsdp_size": 2}, "bailing_hybrid that was loaded whole.*weights of other channels"),
        ("kimi_linear", {"ep_size": 2, "fsdp_size": 2}, "family kimi_linear that was loaded whole"),
        (
            "qwen3_next",
            {"ep_size": 2, "fsdp_size": 2, "ep_implementation": "all_reduce"},
            "'all_to_all'.*'all_reduce'",
        ),
    ],
)
def test_models_that_are_sharded_while_loading(family, options, message):
    """Families that Transformers loads wrongly so, and experts that see one batch on all processes."""
    model = tiny_model(family)
    model._device_mesh, model.config.distributed_config = object(), DistributedConfig(**options)
    refused(model, message)


def test_nothing_to_train():
    """PEFT's default for a loaded adapter is a frozen one."""
    model = tiny_model("qwen3_5_text")
    checks.check_trainable(model)
    with pytest.raises(UnsupportedModelError, match=r"nothing would be trained.*is_trainable=True"):
        checks.check_trainable(model.requires_grad_(False))


@pytest.mark.parametrize("family", FAMILIES)
def test_eager_experts_under_zero_3(family):
    """Their module calls follow the tokens of each rank; all at once, or without ZeRO-3, they do not matter."""
    model = tiny_model(family)
    checks.check_experts(model, zero3=False)
    if family not in MOE_FAMILIES:
        return checks.check_experts(model, zero3=True)
    with pytest.raises(UnsupportedModelError, match=r"gathers module by module.*'eager'.*'grouped_mm'"):
        checks.check_experts(model, zero3=True)
    model.set_experts_implementation("grouped_mm")
    checks.check_experts(model, zero3=True)


def test_plan_with_other_arguments():
    """A plan says everything about a forward; a mask or a cache beside it is an error."""
    model = patch(tiny_model("qwen3_5_text"))
    with pytest.raises(ValueError, match="got input_ids"):
        model(input_ids=torch.zeros(1, 3, dtype=torch.long), harts=object())
    with pytest.raises(ValueError, match="expected harts to be a TreePass, got object"):
        model(harts=object())


def test_lora():
    """LoRA works, on the embedding too: log-probs and adapter gradients equal the stock PEFT model's in float64."""
    targets = ["in_proj_qkv", "q_proj", "v_proj", "up_proj", "embed_tokens"]
    model = get_peft_model(tiny_model("qwen3_5_text"), LoraConfig(target_modules=targets, r=3)).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "lora_embedding_A" in name:  # start at 0, which would hide the other's gradient
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    rows = random_trajectories(3, vocab=VOCAB)
    weights = random_weights(rows, torch.float64)
    with float64_everywhere(model.get_base_model()):
        sum((trajectory_log_probs(model, row) * w).sum() for row, w in zip(rows, weights, strict=True)).backward()
        expected = gradients(model)
        model.zero_grad()
        log_probs = tree_logprobs(model, rows)
        sum((value * w).sum() for value, w in zip(log_probs, weights, strict=True)).backward()
    assert is_patched(model)
    assert any("lora_A" in name and value.any() for name, value in expected.items())
    assert_gradients_close(gradients(model), expected, 1e-9)
