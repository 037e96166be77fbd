"""Policies given by name: multimodal checkpoints train as text models; what is refused at the start."""

import json
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from safetensors import safe_open
from support import recorded
from support.models import tiny_model
from support.multimodal import multimodal_checkpoint
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerBase
from trl.trainer import grpo_trainer

from harts_hf import TreeGRPOConfig, TreeGRPOTrainer, TreeRLOOConfig, TreeRLOOTrainer
from harts_hf.errors import UnsupportedModelError
from harts_hf.trainers.sampling import why_not_sampled


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_a_multimodal_checkpoint_trains_as_its_text_model(kind, tmp_path):
    """By its name alone, with a reference model: a step; what is saved loads again, under the names that it had."""
    checkpoint = multimodal_checkpoint(kind, tmp_path / "checkpoint")
    stock = grpo_trainer.create_model_from_path
    trainer = TreeGRPOTrainer(
        str(checkpoint),
        recorded.recorded_reward,
        TreeGRPOConfig(**recorded.arguments(tmp_path / "out", max_steps=1, beta=0.1)),
        recorded.dataset(),
        rollout_func=recorded.rollout_func,
    )
    assert grpo_trainer.create_model_from_path is stock
    assert isinstance(trainer.processing_class, PreTrainedTokenizerBase)
    assert trainer.processing_class.padding_side == "left"
    whole = AutoModelForImageTextToText.from_pretrained(checkpoint).model.language_model
    for model in (trainer.model, trainer.ref_model):
        assert model.config.model_type == f"{kind}_text" and not hasattr(model, "visual")
        for name, parameter in model.model.named_parameters():
            assert torch.equal(parameter, whole.get_parameter(name)), name
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    moved = 0
    for (name, new), old in zip(again.named_parameters(), trainer.ref_model.parameters(), strict=True):
        assert torch.equal(new, trainer.model.get_parameter(name)), name
        moved += int(not torch.equal(new, old))
    assert moved > len(list(again.parameters())) / 2
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["model_type"] == f"{kind}_text"
    with safe_open(tmp_path / "saved" / "model.safetensors", "pt") as file:
        assert any(name.startswith("model.language_model.") for name in file.keys())  # noqa: SIM118


def test_rloo_loads_them_too(tmp_path):
    """Its module of TRL loads models by a name of its own."""
    checkpoint = multimodal_checkpoint("qwen3_5", tmp_path / "checkpoint")
    args = TreeRLOOConfig(**recorded.arguments(tmp_path / "out", beta=0.0))
    trainer = TreeRLOOTrainer(str(checkpoint), recorded.recorded_reward, args, recorded.dataset())
    assert trainer.model.config.model_type == "qwen3_5_text"


def test_a_configuration_without_architectures(tmp_path):
    """A folder whose configuration names no class is a causal language model."""
    tiny_model("qwen3_5_text").save_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "architectures": None}))
    recorded.tokenizer().save_pretrained(tmp_path / "model")
    trainer = TreeGRPOTrainer(
        str(tmp_path / "model"),
        recorded.recorded_reward,
        TreeGRPOConfig(**recorded.arguments(tmp_path / "out")),
        recorded.dataset(),
        rollout_func=recorded.rollout_func,
    )
    assert type(trainer.model).__name__ == "Qwen3_5ForCausalLM"


def test_dropout_of_adapters_is_named_with_what_works(tmp_path):
    """The field, its value, and the value that works."""
    with pytest.raises(
        UnsupportedModelError, match=r"got lora_dropout = 0\.05 in adapter 'default': set lora_dropout=0"
    ):
        TreeGRPOTrainer(
            tiny_model("qwen3_5_text"),
            recorded.recorded_reward,
            TreeGRPOConfig(**recorded.arguments(tmp_path)),
            recorded.dataset(),
            processing_class=recorded.tokenizer(),
            rollout_func=recorded.rollout_func,
            peft_config=LoraConfig(lora_dropout=0.05, target_modules="all-linear"),
        )


class Collector:
    """A rollout function that samples turn by turn."""

    uses_engine = True


ENGINE = {"rollout_func": Collector()}
TOOLS = {"tools": [print], "rollout_func": None}
OWN = {"rollout_func": lambda prompts, trainer: {}, "tools": []}


@pytest.mark.parametrize(
    ("has", "given", "processes", "message"),
    [
        (ENGINE, {}, 8, None),
        (ENGINE, {"is_fsdp": True}, 1, None),
        (ENGINE, {"is_fsdp": True}, 8, "got FSDP: serve the policy with vLLM (use_vllm: true, vllm_mode: server"),
        (ENGINE, {"is_zero3": True, "gathers": True}, 8, None),
        (ENGINE, {"is_zero3": True, "gathers": False}, 8, "got ZeRO-3: serve the policy with vLLM"),
        (ENGINE, {"is_fsdp": True, "vllm": "server"}, 8, None),
        (ENGINE, {"vllm": "colocate"}, 1, "expected vllm_mode 'server' for environments and agents"),
        (TOOLS, {}, 8, None),
        (TOOLS, {"is_fsdp": True}, 1, None),
        (TOOLS, {"is_fsdp": True}, 8, "with TRL's tools and environment_factory"),
        (TOOLS, {"is_zero3": True, "gathers": True}, 8, "got 8 processes and ZeRO-3"),
        (TOOLS, {"vllm": "server"}, 1, None),
        (TOOLS, {"vllm": "server"}, 2, "got 2 processes and a vLLM server"),
        (TOOLS, {"vllm": "colocate", "is_fsdp": True}, 2, None),
        ({"tools": []}, {"is_fsdp": True}, 8, None),
        ({}, {"is_zero3": True}, 8, None),
        (OWN, {"is_fsdp": True}, 8, None),
    ],
)
def test_where_rollouts_cannot_be_sampled(has, given, processes, message):
    """The table of harts_hf.trainers.sampling, each cell."""
    options = dict(given)
    mode, gathers = options.pop("vllm", None), options.pop("gathers", True)
    args = SimpleNamespace(vllm_mode=mode, ds3_gather_for_generation=gathers)
    trainer = SimpleNamespace(args=args, use_vllm=mode is not None, **has)
    backend = {"is_fsdp": False, "is_zero3": False, **options}
    reason = why_not_sampled(trainer, num_processes=processes, **backend)
    assert reason is None if message is None else message in reason
