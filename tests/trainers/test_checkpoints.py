"""Checkpoints are plain Hugging Face checkpoints, and a resumed run equals the uninterrupted one.

Equal means bit for bit here: the same process computes the same things in the same order. It holds where a checkpoint
falls on the end of a generation batch, since TRL drops what is left of one.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import recorded
from support.models import FAMILIES, tiny_model
from support.trainer_runs import TIMED

from harts_hf import TreeGRPOConfig, TreeGRPOTrainer

# Loads the checkpoint as anybody would, and says what it holds.
LOAD_ELSEWHERE = """
import sys, torch
from transformers import AutoModelForCausalLM
from safetensors.torch import save_file
folder, out = sys.argv[1:]
model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, experts_implementation="eager")
assert not any(info.values()), info
assert not any(name.partition(".")[0] == "harts_hf" for name in sys.modules)
with torch.no_grad():
    logits = model(input_ids=torch.arange(3, 40)[None], use_cache=False).logits
parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
save_file({"logits": logits, **parameters}, out)
"""


def train(folder: Path, *, family: str = "qwen3_5_text", resume: str | None = None, **options) -> TreeGRPOTrainer:
    """Trains a fresh model on recorded rollouts, from a checkpoint if ``resume`` names one."""
    model = tiny_model(family, seed=1)
    if hasattr(model.config, "router_aux_loss_coef"):
        model.config.router_aux_loss_coef = 0.0  # not what is tested here
    trainer = TreeGRPOTrainer(
        model,
        recorded.recorded_reward,
        args=TreeGRPOConfig(
            **recorded.arguments(folder, **{"save_strategy": "steps", "tree_sharing": "always", **options})
        ),
        train_dataset=recorded.dataset(),
        processing_class=recorded.tokenizer(),
        rollout_func=recorded.rollout_func,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("family", FAMILIES)
def test_loads_without_us(family, tmp_path):
    """A process that never imports harts_hf loads a checkpoint: nothing missing or left over, equal logits."""
    model = train(tmp_path, family=family, save_steps=1, max_steps=1).model
    command = [sys.executable, "-c", LOAD_ELSEWHERE, str(tmp_path / "checkpoint-1"), str(tmp_path / "loaded")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    loaded = load_file(tmp_path / "loaded")
    logits = loaded.pop("logits")
    assert loaded.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded[name], parameter), name
    with torch.no_grad():
        assert torch.equal(model(input_ids=torch.arange(3, 40)[None], use_cache=False).logits, logits)
    config = json.loads((tmp_path / "checkpoint-1" / "config.json").read_text())
    assert config["architectures"] == [type(model).__name__]
    assert "harts" not in (tmp_path / "checkpoint-1" / "config.json").read_text()


# Optimizer steps a generation batch lasts: steps_per_generation * num_iterations / gradient_accumulation_steps.
RUNS = {
    "every-step": {"max_steps": 4, "save_steps": 2},
    "iterations": {"max_steps": 4, "save_steps": 2, "num_iterations": 2, "epsilon": 0.05},
    "long-generations": {"max_steps": 4, "save_steps": 2, "steps_per_generation": 4},
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


@pytest.mark.parametrize("name", RUNS)
def test_resumed_run_equals_the_uninterrupted_one(name, tmp_path):
    """Parameters and every logged metric after resuming are those of the run that was never stopped."""
    options = RUNS[name]
    checkpoint = tmp_path / f"checkpoint-{options['save_steps']}"
    whole = train(tmp_path, **options)
    resumed = train(tmp_path / "resumed", resume=str(checkpoint), **options)
    assert resumed.state.global_step == whole.state.global_step == options["max_steps"]
    start = load_file(checkpoint / "model.safetensors")
    moved = 0.0
    for (parameter_name, expected), got in zip(
        whole.model.named_parameters(), resumed.model.parameters(), strict=True
    ):
        assert torch.equal(got, expected), parameter_name
        moved = max(moved, (expected - start[parameter_name]).abs().max().item())
    assert moved > 1e-4, "nothing was trained after the checkpoint"
    expected_log, got_log = whole.state.log_history[:-1], resumed.state.log_history[:-1]
    assert len(got_log) == len(expected_log) == options["max_steps"]
    for expected_entry, got_entry in zip(expected_log, got_log, strict=True):
        for key, value in expected_entry.items():
            if not key.endswith((*TIMED, "_seconds")):
                assert got_entry[key] == value, key
