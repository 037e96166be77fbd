"""PEFT methods: those that are allowed compute on a tree what they compute on each trajectory; the rest is refused."""

from dataclasses import fields

import peft
import pytest
import torch
from peft import LoraConfig, TrainableTokensConfig, get_peft_model
from peft.tuners.lora.config import BdLoraConfig, KasaConfig, MontecloraConfig, VeloraConfig
from support.models import VOCAB, tiny_model
from support.oracle import float64_everywhere, gradients, random_weights, trajectory_log_probs
from support.trees import random_trajectories

from harts_hf import PlannerConfig, UnsupportedModelError, patch, tree_logprobs, unpatch
from harts_hf.modeling import vocab_size_of
from harts_hf.modeling.adapters import LORA_OPTIONS, METHODS

ONE = {"target_modules": ["q_proj"]}
SQUARE = {"target_modules": ["o_proj"]}
# Methods that compute in float32 whatever the model's dtype.
FLOAT32 = ("c3a", "deft", "fourierft", "osf")
ALLOWED = {
    "adalora": lambda: peft.AdaLoraConfig(r=4, total_step=10, **ONE),
    "beft": lambda: peft.BeftConfig(target_modules=["v_proj"]),
    "boft": lambda: peft.BOFTConfig(boft_block_size=8, **ONE),
    "c3a": lambda: peft.C3AConfig(block_size=8, **SQUARE),
    "deft": lambda: peft.DeftConfig(r=4, **ONE),
    "delora": lambda: peft.DeloraConfig(r=4, **ONE),
    "fourierft": lambda: peft.FourierFTConfig(n_frequency=10, **ONE),
    "frod": lambda: peft.FrodConfig(**ONE),
    "glora": lambda: peft.GloraConfig(r=4, **ONE),
    "gralora": lambda: peft.GraloraConfig(r=4, **ONE),
    "hira": lambda: peft.HiraConfig(r=4, **ONE),
    "hra": lambda: peft.HRAConfig(r=4, **ONE),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "ln_tuning": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "loha": lambda: peft.LoHaConfig(r=4, **ONE),
    "lokr": lambda: peft.LoKrConfig(r=4, **ONE),
    "lora": lambda: LoraConfig(target_modules=["q_proj", "in_proj_qkv", "down_proj"]),
    "lora-bias": lambda: LoraConfig(bias="all", lora_bias=True, **ONE),
    "lora-bdlora": lambda: LoraConfig(use_bdlora=BdLoraConfig(["q_proj"], nblocks=2, match_strict=False), **ONE),
    "lora-dora": lambda: LoraConfig(use_dora=True, target_modules=["q_proj", "in_proj_qkv", "embed_tokens"]),
    "lora-kasa": lambda: LoraConfig(kasa_config=KasaConfig(), **ONE),
    "lora-mica": lambda: LoraConfig(init_lora_weights="mica", **ONE),
    "lora-parameters": lambda: LoraConfig(
        r=2, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"], **ONE
    ),
    "lora-pissa": lambda: LoraConfig(init_lora_weights="pissa", **ONE),
    "lora-qalora": lambda: LoraConfig(use_qalora=True, qalora_group_size=8, **ONE),
    "lora-rslora": lambda: LoraConfig(use_rslora=True, **ONE),
    "lora-saved": lambda: LoraConfig(modules_to_save=["embed_tokens", "input_layernorm"], **ONE),
    "lora-saved-linear": lambda: LoraConfig(r=4, target_modules=["down_proj"], modules_to_save=["linear_attn"]),
    "lora-saved-full": lambda: LoraConfig(r=4, target_modules=["down_proj"], modules_to_save=["self_attn"]),
    "lora-tokens": lambda: LoraConfig(trainable_token_indices=[5, 6, 7], **ONE),
    "miss": lambda: peft.MissConfig(r=4, **ONE),
    "oft": lambda: peft.OFTConfig(r=0, oft_block_size=8, **ONE),
    "osf": lambda: peft.OSFConfig(**ONE),
    "peanut": lambda: peft.PeanutConfig(r=4, **ONE),
    "psoft": lambda: peft.PsoftConfig(r=4, **ONE),
    "randlora": lambda: peft.RandLoraConfig(r=4, **SQUARE),
    "road": lambda: peft.RoadConfig(**ONE),
    "shira": lambda: peft.ShiraConfig(r=4, **ONE),
    "supertuning": lambda: peft.SupertuningConfig(**ONE),
    "tinylora": lambda: peft.TinyLoraConfig(r=2, **ONE),
    "trainable_tokens": lambda: TrainableTokensConfig(token_indices=[5, 6, 7], target_modules=["embed_tokens"]),
    "unilora": lambda: peft.UniLoraConfig(r=4, **ONE),
    "vblora": lambda: peft.VBLoRAConfig(r=4, num_vectors=8, vector_length=8, **ONE),
    "vera": lambda: peft.VeraConfig(r=4, **SQUARE),
    "waveft": lambda: peft.WaveFTConfig(n_frequency=10, **SQUARE),
}


def with_adapter(config, family="qwen3_5_text"):
    """A model whose adapter's parameters are all drawn at random, so that none hides at 0."""
    model = get_peft_model(tiny_model(family), config).double().train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


@pytest.mark.essential("ia3", "lora", "lora-parameters", "lora-saved-linear", "trainable_tokens")
@pytest.mark.parametrize("name", ALLOWED)
def test_allowed_methods_equal_one_trajectory_at_a_time(name):
    """Log-probs, and gradients of everything that is trained, of the unpatched model with the same adapter."""
    model = with_adapter(ALLOWED[name](), "qwen3_next" if name == "lora-parameters" else "qwen3_5_text")
    rows = random_trajectories(3, vocab=VOCAB, count=4)
    weights = random_weights(rows, torch.float64)
    with float64_everywhere(model):
        stock = [trajectory_log_probs(model, row) for row in rows]
        sum((value * w).sum() for value, w in zip(stock, weights, strict=True)).backward()
        expected = gradients(model)
        model.zero_grad()
        planner = PlannerConfig(max_tokens_per_microbatch=64, sharing="always")
        log_probs = tree_logprobs(model, rows, planner)
        sum((value * w).sum() for value, w in zip(log_probs, weights, strict=True)).backward()
        with model.disable_adapter(), torch.no_grad():
            without = trajectory_log_probs(model, rows[0])
    assert (stock[0] - without).abs().max() > 1e-3, "the adapter does nothing"
    for value, reference in zip(log_probs, stock, strict=True):
        assert (value - reference).abs().max() <= 1e-12
    relative = 1e-5 if name in FLOAT32 else 1e-10
    assert any(reference.any() for reference in expected.values())
    for parameter, gradient in gradients(model).items():
        error = (gradient - expected[parameter]).abs().max()
        assert error <= relative * expected[parameter].abs().max(), parameter


def test_every_allowed_method_is_tested():
    """The list of methods is the list above; every option of LoRA is either allowed, or refused."""
    assert {name.partition("-")[0].upper() for name in ALLOWED} == METHODS
    assert {field.name for field in fields(LoraConfig)} > LORA_OPTIONS


REFUSED = {
    "alora_invocation_tokens": lambda: LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=[7, 9], **ONE),
    "velora_config": lambda: LoraConfig(velora_config=VeloraConfig(num_groups=4), **ONE),
    "monteclora_config": lambda: LoraConfig(monteclora_config=MontecloraConfig(), **ONE),
    "LILY": lambda: peft.LilyConfig(r=4, **ONE),
    "POLY": lambda: peft.PolyConfig(r=4, n_tasks=1, n_skills=1, **ONE),
    "PVERA": lambda: peft.PveraConfig(r=4, **SQUARE),
    "SHADOW": lambda: peft.ShadowConfig(),
    "PREFIX_TUNING": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    # Dropouts that are no torch.nn.Dropout.
    "module_dropout": lambda: peft.LoHaConfig(r=4, module_dropout=0.1, **ONE),
    "rank_dropout": lambda: peft.LoKrConfig(r=4, rank_dropout=0.1, **ONE),
    "boft_dropout": lambda: peft.BOFTConfig(boft_block_size=8, boft_dropout=0.1, **ONE),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_methods_are_refused_by_name(name):
    """What reads ids, adds positions, pools over tokens or draws at random."""
    with pytest.raises(UnsupportedModelError, match=name):
        patch(get_peft_model(tiny_model("qwen3_5_text"), REFUSED[name]()))


def test_an_adapter_that_is_added_after_patching_is_refused():
    """By the next forward, and by the next call of patch; the model can be unpatched all the same."""
    rows = random_trajectories(3, vocab=VOCAB)
    model = patch(get_peft_model(tiny_model("qwen3_5_text"), LoraConfig(task_type="CAUSAL_LM", **ONE)))
    tree_logprobs(model, rows)
    model.add_adapter("activated", REFUSED["alora_invocation_tokens"]())
    for use in (lambda: tree_logprobs(model, rows), lambda: patch(model), lambda: model(harts=1)):
        with pytest.raises(UnsupportedModelError, match=r"alora_invocation_tokens=\[7, 9\] in adapter 'activated'"):
            use()
    unpatch(model)
    injected = patch(tiny_model("qwen3_5_text"))
    peft.inject_adapter_in_model(REFUSED["alora_invocation_tokens"](), injected)
    with pytest.raises(UnsupportedModelError, match="alora_invocation_tokens"):
        tree_logprobs(injected, rows)


def test_trainable_tokens():
    """The vocabulary is that of the wrapped embedding; with tied embeddings the head would be an adapter's."""
    assert vocab_size_of(with_adapter(ALLOWED["lora-tokens"]())) == VOCAB
    tied = tiny_model("qwen3_5_text", tie_word_embeddings=True)
    with pytest.raises(UnsupportedModelError, match="with tied embeddings trainable_token_indices trains"):
        patch(get_peft_model(tied, ALLOWED["lora-tokens"]()))
