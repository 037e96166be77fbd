"""Load of experts and the update of their bias against stock TRL with counting hooks; integers, and bit for bit."""

import json
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from support import recorded
from support.counted import SPEED, CountedGRPOTrainer
from support.models import tiny_model
from support.trainer_runs import assert_same_training, run_trainer
from transformers import TrainerCallback
from trl import GRPOConfig

from harts_hf import TreeGRPOConfig, TreeGRPOTrainer, UnsupportedModelError
from harts_hf.trainers.expert_load import send_bias_to_engines

SHARED = {"tree_sharing": "always", "tree_max_tokens_per_microbatch": 64}
# Truncated rows count with their prompts.
OPTIONS = {"mask_truncated_completions": True, "max_steps": 5, "learning_rate": 0.005}


def trainer_of(model):
    """Something with a model."""
    return SimpleNamespace(model=model)


def biases(trainer):
    """Of every router."""
    named = trainer.model.named_buffers()
    return [buffer for name, buffer in named if name.endswith("e_score_correction_bias")]


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["bailing_hybrid", pytest.param("kimi_linear", marks=pytest.mark.slow)])
def test_bias_after_five_steps(family, tmp_path):
    """Loads are equal integers in every step, biases equal, and what is trained with them; groups of experts too."""
    options = {"family": family, "make_model": tiny_model, **OPTIONS}
    stock = run_trainer(CountedGRPOTrainer, GRPOConfig, tmp_path / "stock", **options)
    loads = []

    class Noted(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            loads.append(tree_load().latest.clone())

    holder = {}

    def tree_load():
        return holder["trainer"]._tree.expert_load

    class Kept(TreeGRPOTrainer):
        def __init__(self, *args, **kwargs):
            holder["trainer"] = self
            super().__init__(*args, **kwargs)

    tree = run_trainer(
        Kept,
        TreeGRPOConfig,
        tmp_path / "tree",
        callbacks=[Noted()],
        tree_expert_bias_update_speed=SPEED,
        **SHARED,
        **options,
    )
    assert len(loads) == len(stock[2].steps) == 5
    for step, (load, expected) in enumerate(zip(loads, stock[2].steps, strict=True)):
        assert torch.equal(load, expected.double()), f"step {step}"
    start = biases(trainer_of(tiny_model(family, dtype=torch.float64, seed=1)))
    for bias, expected, before in zip(biases(tree[2]), biases(stock[2]), start, strict=True):
        assert torch.equal(bias, expected) and not torch.equal(bias, before)
    assert_same_training(stock, tree, family=family, make_model=tiny_model)
    written = json.loads((tmp_path / "tree" / "expert_load.json").read_text())
    assert written["load"] == sum(stock[2].steps).tolist() and written["steps"] == 5
    assert len(written["layers"]) == len(written["load"])
    assert (tmp_path / "tree" / "expert_load.png").stat().st_size > 1000
    log, load = tree[1][0], loads[0]
    assert log["tree/expert_load_max_over_mean"] == pytest.approx((load.amax(1) / load.mean(1)).max().item())
    cv = (load.std(1, correction=0) / load.mean(1)).mean().item()
    assert log["tree/expert_load_cv"] == pytest.approx(cv)
    assert 0 < log["tree/router_entropy"] < torch.tensor(8.0).log()


@pytest.mark.exhaustive
def test_load_without_a_scoring_pass(tmp_path):
    """Counted once where scoring is left out or kept, where layers are computed twice, where one forward does all."""
    found = []
    for options in (
        {"tree_execution": "nested", "gradient_checkpointing": True},
        {"tree_execution": "replay", "num_iterations": 2, "gradient_checkpointing": True},
        {"tree_max_tokens_per_microbatch": 4096},
    ):
        options = {**SHARED, "router_aux_loss_coef": 0.0, "max_steps": 1, **options}
        run = run_trainer(TreeGRPOTrainer, TreeGRPOConfig, tmp_path, family="qwen3_next", **options)
        found.append(run[2]._tree.expert_load.latest)
        assert run[1][0]["tree/scoring_skipped"] == ("tree_execution" in options)
        assert run[1][0]["tree/scoring_kept"] == ("num_iterations" in options)
    expanded = run[1][0]["tree/expanded_tokens"]
    for load in found:
        assert torch.equal(load, found[0])
        assert load.sum(dim=1).tolist() == [2 * expanded] * 2


def test_bias_goes_to_vllm():
    """TRL walks parameters; the biases come after them, under the names that it gives them, on every walk."""
    model = tiny_model("bailing_hybrid")
    generation = SimpleNamespace(
        model=model,
        _iter_named_params=lambda: iter(model.named_parameters()),
        _fix_param_name_to_vllm=lambda name: name.replace("model.", "inner.", 1),
    )
    trainer = SimpleNamespace(
        vllm_generation=generation, accelerator=SimpleNamespace(unwrap_model=lambda wrapped: wrapped)
    )
    send_bias_to_engines(trainer)
    for _ in range(2):
        sent = list(generation._iter_named_params())
        assert sent[: -len(biases(trainer_of(model)))] == list(model.named_parameters())
        added = dict(sent[-2:])
        assert set(added) == {f"inner.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)}
        for value, bias in zip(added.values(), biases(trainer_of(model)), strict=True):
            assert value is bias
    send_bias_to_engines(SimpleNamespace())  # no engine


def test_refusals(tmp_path):
    """A bias that is not there, that adapters' checkpoints lack, or that would lose its updates; a bad speed."""
    bias = {"tree_expert_bias_update_speed": 0.001}
    with pytest.raises(UnsupportedModelError, match=r"routers have a bias \(bailing_hybrid, kimi_linear\)"):
        run_trainer(TreeGRPOTrainer, TreeGRPOConfig, tmp_path, family="qwen3_5_text", **bias)
    lora = LoraConfig(target_modules=["q_a_proj"], task_type="CAUSAL_LM")
    with pytest.raises(UnsupportedModelError, match="without adapters"):
        run_trainer(TreeGRPOTrainer, TreeGRPOConfig, tmp_path, family="bailing_hybrid", peft_config=lora, **bias)
    model = tiny_model("bailing_hybrid", dtype=torch.bfloat16)
    with pytest.raises(UnsupportedModelError, match=r"biases in float32, got torch.bfloat16"):
        TreeGRPOTrainer(
            model,
            recorded.recorded_reward,
            args=TreeGRPOConfig(**recorded.arguments(tmp_path, **bias)),
            train_dataset=recorded.dataset(),
            processing_class=recorded.tokenizer(),
            rollout_func=recorded.rollout_func,
        )
    for speed in (-0.1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="tree_expert_bias_update_speed to be a finite number of at least 0"):
            TreeGRPOConfig(output_dir=str(tmp_path), use_cpu=True, tree_expert_bias_update_speed=speed)
    with pytest.raises(UnsupportedModelError, match=r"mixture of experts with tree_replay_routing='scoring'"):
        run_trainer(TreeGRPOTrainer, TreeGRPOConfig, tmp_path, family="qwen3_5_text", tree_replay_routing=True)
