"""Liger, compiled models and FP8 are refused by name, with what there is instead."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from support import recorded
from support.models import tiny_model
from torch import nn

from harts_hf import TreeGRPOConfig, TreeGRPOTrainer, TreePPOTrainer, TreeRLOOTrainer, TreeSFTTrainer
from harts_hf.errors import UnsupportedModelError
from harts_hf.trainers import hooks, refusals
from harts_hf.trainers.acceleration import check_acceleration


def trainer(*, model=None, mixed_precision="bf16", dynamo="no", **args):
    """What is looked at of a trainer."""
    state = SimpleNamespace(dynamo_plugin=TorchDynamoPlugin(backend=DynamoBackend(dynamo.upper())))
    return SimpleNamespace(
        args=SimpleNamespace(**{"use_liger_kernel": False, "torch_compile": False, **args}),
        accelerator=SimpleNamespace(mixed_precision=mixed_precision, state=state),
        model=model or nn.Sequential(nn.Linear(2, 2)),
    )


def compiled_layer():
    """A model with a layer that was compiled in place."""
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].compile()
    return model


def compiled_otherwise(*, forward):
    """A model with a layer in torch.compile's wrapper, or whose forward is compiled."""
    model = nn.Sequential(nn.Linear(2, 2))
    if forward:
        model[0].forward = torch.compile(model[0].forward, backend="eager")
    else:
        model[0] = torch.compile(model[0], backend="eager")
    return model


def test_plain_settings_pass():
    """In bf16 and without."""
    check_acceleration(trainer())
    check_acceleration(trainer(mixed_precision="no"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_liger_kernel": True}, "use_liger_kernel=False, got True: .* tree_fused_modules='auto'"),
        ({"torch_compile": True}, "uncompiled model, got torch_compile=True: .* tree_fused_modules='auto'"),
        ({"dynamo": "inductor"}, "uncompiled model, got Accelerate's dynamo backend INDUCTOR"),
        ({"model": compiled_layer}, r"uncompiled model, got 0 after compile\(\)"),
        ({"model": partial(compiled_otherwise, forward=False)}, "uncompiled model, got torch.compile of 0: "),
        ({"model": partial(compiled_otherwise, forward=True)}, "uncompiled model, got torch.compile of 0's forward"),
        ({"mixed_precision": "fp8"}, "bf16 or none, got fp8 .* bf16=True"),
    ],
    ids=["liger", "torch_compile", "dynamo", "compile", "wrapper", "forward", "fp8"],
)
def test_refused(settings, message):
    """However it was asked for. (Nothing is compiled when this file is collected: that imports PyTorch's compiler.)"""
    if "model" in settings:
        settings = {"model": settings["model"]()}
    with pytest.raises(UnsupportedModelError, match=message):
        check_acceleration(trainer(**settings))


def test_compiled_before_or_after(tmp_path):
    """The wrapper that torch.compile returns, before TRL sees it; a model that is compiled once its trainer stands."""
    options = {
        "reward_funcs": recorded.recorded_reward,
        "train_dataset": recorded.dataset(),
        "processing_class": recorded.tokenizer(),
        "rollout_func": recorded.rollout_func,
        "args": TreeGRPOConfig(**recorded.arguments(tmp_path)),
    }
    model = tiny_model("qwen3_5_text")
    with pytest.raises(ValueError, match=r"uncompiled model, got torch\.compile of a model: .* as it was loaded"):
        TreeGRPOTrainer(torch.compile(model, backend="eager"), **options)
    made = TreeGRPOTrainer(model, **options)
    made.model.compile(backend="eager")
    with pytest.raises(ValueError, match=r"uncompiled model, got a model after compile\(\)"):
        made.train()


@pytest.mark.parametrize("kind", [TreeGRPOTrainer, TreeRLOOTrainer, TreePPOTrainer, TreeSFTTrainer])
def test_every_trainer_asks(kind, monkeypatch):
    """Before it patches the model."""

    def refusing(trainer):
        raise UnsupportedModelError("asked")

    for name in ("check_processes", "check_backend"):
        monkeypatch.setattr(refusals, name, lambda _: None)
    monkeypatch.setattr(refusals, "check_acceleration", refusing)
    monkeypatch.setattr(hooks, "patch", lambda _: pytest.fail("patched"))
    one = object.__new__(kind)
    one.args, one.value_model, one.model = SimpleNamespace(), None, nn.Linear(2, 2)
    one.accelerator = SimpleNamespace(state=None)
    with pytest.raises(UnsupportedModelError, match="asked"):
        one._begin_tree(object)
