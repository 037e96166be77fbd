"""Activation checkpointing of some layers, which TRL switches off and on: of those that were asked for, to the end."""

import copy

import pytest
import torch
from datasets import Dataset
from support import recorded
from support.models import tiny_model
from support.trainer_runs import run_trainer
from trl import GRPOConfig, GRPOTrainer

from harts_hf import TreeGRPOConfig, TreeGRPOTrainer, TreeSFTConfig, TreeSFTTrainer
from harts_hf.modeling.checkpointing import allow_some_layers, checkpointed_every
from harts_hf.modeling.memory import row_bytes

CUT = {"tree_sharing": "always", "tree_max_tokens_per_microbatch": 64, "max_steps": 2, "learning_rate": 0.1}
ON = {"gradient_checkpointing": True}
DATA = {
    "train_dataset": Dataset.from_dict({"prompt": ["t3 "], "completion": ["t4"]}),
    "processing_class": recorded.tokenizer(),
}


def checkpointed(model):
    """Which layers are."""
    return [layer.gradient_checkpointing for layer in model.model.layers]


@pytest.mark.exhaustive
def test_every_second_layer(tmp_path):
    """The same bits as of all layers; a generation stands before each step."""
    runs = {}
    for every in (1, 2):
        kwargs = {"use_reentrant": False, **({"every_n_layers": every} if every > 1 else {})}
        runs[every] = run_trainer(
            TreeGRPOTrainer, TreeGRPOConfig, tmp_path / str(every), gradient_checkpointing_kwargs=kwargs, **ON, **CUT
        )
    for name, value in runs[1][0].items():
        assert torch.equal(runs[2][0][name], value), name
    layers = len(runs[2][2].model.model.layers)
    assert checkpointed(runs[1][2].model) == [True] * layers
    assert sorted(checkpointed(runs[2][2].model)) == [False] * (layers // 2) + [True] * (layers - layers // 2)


@pytest.mark.parametrize("every", [0, -1, "2", 1.5, True, None])
def test_numbers_of_layers(every):
    """Others than 1, 2, ... are refused before anything is sampled."""
    kwargs = {"use_reentrant": False, "every_n_layers": every}
    with pytest.raises(ValueError, match=r"expected every_n_layers .* integer of at least 1, got"):
        checkpointed_every(kwargs)


@pytest.mark.parametrize("key", ["selective", "every_n_layer"])
def test_keys_that_nobody_reads(tmp_path, key):
    """PyTorch hands them on to the layers, so that all would be checkpointed without a word."""
    kwargs = {"use_reentrant": False, "early_stop": False, key: 2}
    message = rf"no other keys than context_fn, .*, use_reentrant, got '{key}'"
    for trainer, config in ((TreeGRPOTrainer, TreeGRPOConfig), (TreeSFTTrainer, TreeSFTConfig)):
        args = config(output_dir=str(tmp_path), use_cpu=True, bf16=False, activation_checkpointing_kwargs=kwargs)
        rewards = [len] if trainer is TreeGRPOTrainer else []
        with pytest.raises(ValueError, match=message):
            trainer(tiny_model("qwen3_5_text"), *rewards, args=args, **DATA)


def test_memory_of_some_layers():
    """Between that of all and of none; of layers of which only the first is, that of none but for it."""
    model = tiny_model("qwen3_5_text")
    rows = [row_bytes(model, checkpointing=True, fused=True, every=every).kept for every in (1, 2, 99)]
    assert rows == sorted(rows) and rows[0] < rows[1] < rows[2]
    assert rows[2] < row_bytes(model, checkpointing=False, fused=True).kept


def test_stock_trl_forgets(tmp_path):
    """Where it no longer does, allow_some_layers can go."""
    kwargs = {"use_reentrant": False, "every_n_layers": 2}
    _, _, trainer = run_trainer(
        GRPOTrainer, GRPOConfig, tmp_path, gradient_checkpointing_kwargs=kwargs, max_steps=1, **ON
    )
    assert all(checkpointed(trainer.model))


def test_switching():
    """By either of Transformers' names, alone or among PyTorch's arguments; of a copy, the copy's own layers."""
    model = tiny_model("qwen3_5_text")
    allow_some_layers(model)
    allow_some_layers(model)
    half = [number % 2 == 0 for number in range(len(model.model.layers))]
    for enable, kwargs, more in (
        (model.gradient_checkpointing_enable, {"use_reentrant": False, "every_n_layers": 2}, {}),
        (model.activation_checkpointing_enable, {"use_reentrant": False}, {"every_n_layers": 2}),
    ):
        model.gradient_checkpointing_disable()
        enable(kwargs, **more)
        assert checkpointed(model) == half and kwargs["use_reentrant"] is False
        assert model.model.layers[0]._gradient_checkpointing_func.keywords == {"use_reentrant": False}
    other = copy.deepcopy(model)
    other.gradient_checkpointing_enable({"use_reentrant": False})
    assert checkpointed(model) == half and checkpointed(other) == [True] * len(half)
