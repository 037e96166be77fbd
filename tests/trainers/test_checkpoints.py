"""Checkpoints are plain Hugging Face checkpoints, and a resumed run equals the uninterrupted one.

Equal means bit for bit here: the same process computes the same things in the same order, also where a checkpoint
falls into a generation batch or between two logged steps.
"""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from support import recorded
from support.launching import write_python
from support.models import FAMILIES, shallow_model, tiny_model
from support.trainer_runs import TIMED

from harts_hf import TreeGRPOConfig, TreeGRPOTrainer
from harts_hf.trainers.resuming import load_weights

FAMILY = "qwen3_5_text"
# Loads checkpoints as anybody would, and says what they hold.
LOAD_ELSEWHERE = """
import sys, torch
from transformers import AutoModelForCausalLM
from safetensors.torch import save_file
for folder in sys.argv[1:]:
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, experts_implementation="eager"
    )
    assert not any(info.values()), info
    with torch.no_grad():
        logits = model(input_ids=torch.arange(3, 40)[None], use_cache=False).logits
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    save_file({"logits": logits, **parameters}, folder + "/loaded")
assert not any(name.partition(".")[0] == "harts_hf" for name in sys.modules)
"""
# The same for an adapter, on the model that it was trained for.
LOAD_ADAPTER_ELSEWHERE = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from safetensors.torch import save_file
base, folder, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(base, experts_implementation="eager")
model = PeftModel.from_pretrained(model, folder)
assert not any(name.partition(".")[0] == "harts_hf" for name in sys.modules)
with torch.no_grad():
    save_file({"logits": model(input_ids=torch.arange(3, 40)[None], use_cache=False).logits}, out)
"""


def train(
    folder: Path,
    *,
    family: str = FAMILY,
    dtype: torch.dtype = torch.float32,
    resume: str | None = None,
    lora: LoraConfig | None = None,
    make_model: Callable[..., torch.nn.Module] = shallow_model,
    **options,
) -> TreeGRPOTrainer:
    """Trains a fresh model on recorded rollouts, from a checkpoint if ``resume`` names one."""
    model = make_model(family, dtype=dtype, seed=1)
    if hasattr(model.config, "router_aux_loss_coef"):
        model.config.router_aux_loss_coef = 0.0  # not what is tested here
    trainer = TreeGRPOTrainer(
        model,
        recorded.recorded_reward,
        args=TreeGRPOConfig(
            **recorded.arguments(folder, **{"save_strategy": "steps", "tree_sharing": "always", **options})
        ),
        train_dataset=recorded.dataset(),
        eval_dataset=recorded.dataset().select(range(2)) if "eval_steps" in options else None,
        processing_class=recorded.tokenizer(),
        rollout_func=recorded.rollout_func,
        peft_config=lora,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.slow
def test_loads_without_us(tmp_path):
    """A process that never imports harts_hf loads checkpoints of all families: nothing missing, equal logits."""
    options = {"save_steps": 1, "max_steps": 1, "make_model": tiny_model}
    models = {family: train(tmp_path / family, family=family, **options).model for family in FAMILIES}
    folders = {family: tmp_path / family / "checkpoint-1" for family in FAMILIES}
    command = [write_python(tmp_path / "python", "packages"), "-c", LOAD_ELSEWHERE, *map(str, folders.values())]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for family, model in models.items():
        loaded = load_file(folders[family] / "loaded")
        logits = loaded.pop("logits")
        assert loaded.keys() == dict(model.named_parameters()).keys(), family
        for name, parameter in model.named_parameters():
            assert torch.equal(loaded[name], parameter), f"{family}: {name}"
        with torch.no_grad():
            assert torch.equal(model(input_ids=torch.arange(3, 40)[None], use_cache=False).logits, logits), family
        config = (folders[family] / "config.json").read_text()
        assert json.loads(config)["architectures"] == [type(model).__name__]
        assert "harts" not in config


@pytest.mark.exhaustive
def test_an_adapter_loads_without_us(tmp_path):
    """A LoRA adapter that was trained on a tree is a plain PEFT adapter with equal logits."""
    family = "bailing_hybrid"
    shallow_model(family, seed=1).save_pretrained(tmp_path / "base")
    lora = LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    model = train(tmp_path, family=family, lora=lora, save_steps=1, max_steps=1).model
    folders = [tmp_path / "base", tmp_path / "checkpoint-1", tmp_path / "loaded"]
    command = [write_python(tmp_path / "python", "packages"), "-c", LOAD_ADAPTER_ELSEWHERE, *map(str, folders)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    with torch.no_grad():
        logits = model(input_ids=torch.arange(3, 40)[None], use_cache=False).logits
        plain = shallow_model(family, seed=1)(input_ids=torch.arange(3, 40)[None], use_cache=False).logits
    assert torch.equal(load_file(tmp_path / "loaded")["logits"], logits)
    assert not torch.equal(plain, logits)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_best_model_is_the_best_checkpoint(family, tmp_path):
    """After load_best_model_at_end every parameter is that of the best checkpoint, none of the last step."""
    options = {
        "max_steps": 2,
        "save_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 4,
    }
    # The first checkpoint is the best one by a metric that only grows.
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_num_tokens", "greater_is_better": False}
    trainer = train(tmp_path, family=family, **options, **best)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    first = dict(type(trainer.model).from_pretrained(tmp_path / "checkpoint-1").named_parameters())
    last = dict(type(trainer.model).from_pretrained(tmp_path / "checkpoint-2").named_parameters())
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, first[name]), name
    assert any(not torch.equal(first[name], last[name]) for name in first)


# Optimizer steps a generation batch lasts: steps_per_generation * num_iterations / gradient_accumulation_steps.
RUNS = {
    "every-step": {"max_steps": 4, "save_steps": 2},
    "iterations": {"max_steps": 4, "save_steps": 2, "num_iterations": 2, "epsilon": 0.05},
    "long-generations": {"max_steps": 4, "save_steps": 2, "steps_per_generation": 4},
    "within-a-generation": {"max_steps": 5, "save_steps": 1, "steps_per_generation": 4, "num_iterations": 2},
    "in-the-second-epoch": {"max_steps": 5, "save_steps": 4, "gradient_accumulation_steps": 4},
    "between-logs": {"max_steps": 6, "save_steps": 2, "logging_steps": 3, "steps_per_generation": 6},
    "adam": {"max_steps": 3, "save_steps": 1, "optim": "adamw_torch", "lr_scheduler_type": "linear"},
    "adaptive-entropy": {
        "max_steps": 4,
        "save_steps": 2,
        "use_adaptive_entropy": True,
        "entropy_target": 3.7,
        "entropy_coef_delta": 0.01,
        "entropy_coef_max": 0.1,
    },
}


# Other families than that of the runs above: checkpoints of some have other names than their modules, where Trainer
# alone would leave most weights as they were.
RUNS |= {family: {"max_steps": 2, "save_steps": 1, "family": family} for family in FAMILIES if family != FAMILY}


@pytest.mark.essential("every-step")
@pytest.mark.parametrize("name", RUNS)
def test_resumed_run_equals_the_uninterrupted_one(name, tmp_path):
    """Parameters and every logged metric after resuming are those of the run that was never stopped."""
    options = RUNS[name]
    checkpoint = tmp_path / f"checkpoint-{options['save_steps']}"
    whole = train(tmp_path, **options)
    resumed = train(tmp_path / "resumed", resume=str(checkpoint), **options)
    assert resumed.state.global_step == whole.state.global_step == options["max_steps"]
    start = dict(type(whole.model).from_pretrained(checkpoint).named_parameters())
    moved = 0.0
    for (parameter_name, expected), got in zip(
        whole.model.named_parameters(), resumed.model.parameters(), strict=True
    ):
        assert torch.equal(got, expected), parameter_name
        moved = max(moved, (expected - start[parameter_name]).abs().max().item())
    assert moved > 1e-4, "nothing was trained after the checkpoint"
    expected_log, got_log = whole.state.log_history[:-1], resumed.state.log_history[:-1]
    assert len(got_log) == len(expected_log) == options["max_steps"] // options.get("logging_steps", 1)
    for expected_entry, got_entry in zip(expected_log, got_log, strict=True):
        for key, value in expected_entry.items():
            if not key.endswith((*TIMED, "_seconds")):
                assert got_entry[key] == value, key


def bfloat16_with_float32_gates(model):
    """The usual mixture: norms and gates in float32, a router's correction too, and the head as TRL casts it."""
    model.to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "norm" in name or "A_log" in name or "dt_bias" in name:
            parameter.data = parameter.data.float()
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            buffer.data = buffer.data.float()
    model.lm_head.float()


def float32_with_frozen_bfloat16_embedding(model):
    """The dtype of the first parameter is the narrower one."""
    model.model.embed_tokens.to(torch.bfloat16).requires_grad_(False)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("mix", [bfloat16_with_float32_gates, float32_with_frozen_bfloat16_embedding])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_loaded_as_it_was_saved(family, mix, sharded, tmp_path):
    """A model of several dtypes gets back the bits of each tensor, from one file and from several."""
    saved, model = shallow_model(family, seed=1), shallow_model(family, seed=2)
    for one in (saved, model):
        mix(one)
        with torch.no_grad():
            for parameter in one.parameters():  # fills the mantissa
                parameter.mul_(1 + torch.rand(parameter.shape) / 3)
    saved.save_pretrained(tmp_path, max_shard_size="20kB" if sharded else "5GB")
    assert (len(list(tmp_path.glob("model*.safetensors"))) > 1) == sharded
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    assert {torch.float32, torch.bfloat16} <= set(dtypes.values())
    assert load_weights(model, str(tmp_path))
    for name, tensor in saved.state_dict().items():
        loaded = model.state_dict()[name]
        assert loaded.dtype == dtypes[name] == tensor.dtype and torch.equal(loaded, tensor), name


def test_modules_that_were_added_are_loaded(tmp_path):
    """A value head is no part of the model's class: it comes back by its name, and is missed if it is not there."""
    saved, model = (shallow_model("qwen3_5_text", seed=seed) for seed in (1, 2))
    saved.save_pretrained(tmp_path / "without")
    for one in (saved, model):
        one.critic = torch.nn.Linear(32, 1, dtype=torch.float64)
    saved.save_pretrained(tmp_path / "with")
    assert load_weights(model, str(tmp_path / "with"))
    assert torch.equal(model.critic.weight, saved.critic.weight) and torch.equal(model.critic.bias, saved.critic.bias)
    with pytest.raises(RuntimeError, match=r"critic\.weight"):
        load_weights(model, str(tmp_path / "without"))


def test_tied_weights_are_loaded_as_they_were_saved(tmp_path):
    """The head and the embedding stay one parameter."""
    saved, model = (shallow_model("qwen3_5_text", seed=seed, tie_word_embeddings=True) for seed in (1, 2))
    for one in (saved, model):
        one.to(torch.bfloat16)
        one.model.norm.float()
        one.model.norm.weight.data.add_(torch.rand(32) / 3)
    saved.save_pretrained(tmp_path)
    assert load_weights(model, str(tmp_path))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for (name, tensor), (_, loaded) in zip(saved.named_parameters(), model.named_parameters(), strict=True):
        assert loaded.dtype == tensor.dtype and torch.equal(loaded, tensor), name


@pytest.mark.exhaustive
def test_resuming_a_head_in_float32(tmp_path):
    """A bfloat16 policy whose head TRL keeps in float32 goes on with the head that it had."""
    options = {"max_steps": 2, "save_steps": 1, "cast_lm_head_to_fp32": True, "dtype": torch.bfloat16}
    whole = train(tmp_path, learning_rate=1e-3, **options)
    resumed = train(tmp_path / "resumed", resume=str(tmp_path / "checkpoint-1"), learning_rate=1e-3, **options)
    assert {p.dtype for p in whole.model.parameters()} == {torch.float32, torch.bfloat16}
    for (name, expected), got in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(got, expected), name
