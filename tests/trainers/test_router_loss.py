"""Two SGD steps with the router's auxiliary loss against stock TRL; the budget is in support.trainer_runs.

TRL computes the auxiliary loss in float32 whatever the model's dtype, as it does log-probs.
"""

import pytest
import torch
from support import episode_runs, recorded
from support.models import shallow_model
from support.oracle import float64_everywhere
from support.texts import arguments as sft_arguments
from support.texts import dataset as texts
from support.trainer_runs import RELATIVE_TOLERANCE, assert_same_training, run_trainer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from harts_hf import (
    TreeGMPOConfig,
    TreeGMPOTrainer,
    TreeGRPOConfig,
    TreeGRPOTrainer,
    TreeRLOOConfig,
    TreeRLOOTrainer,
    TreeSFTConfig,
    TreeSFTTrainer,
    UnsupportedModelError,
)
from harts_hf.errors import HartsWarning

FAMILY = "qwen3_next"
# Large enough that a term left out, or counted otherwise, moves parameters by far more than the tolerance.
AUX = {"family": FAMILY, "router_aux_loss_coef": 0.3}
SHARED = {"tree_sharing": "always", "tree_max_tokens_per_microbatch": 64}


def moved(run, family=FAMILY):
    """By how much a run moved each parameter."""
    start = dict(shallow_model(family, dtype=torch.float64, seed=1).named_parameters())
    return {name: value - start[name].detach() for name, value in run[0].items()}


@pytest.mark.essential("qwen3_5_moe_text")
@pytest.mark.parametrize("family", ["qwen3_5_moe_text", pytest.param("bailing_hybrid", marks=pytest.mark.slow)])
def test_grpo(family, tmp_path):
    """Two micro-steps of different rows in a step, a tree that is cut, truncated rows of which only prompts count.

    A coefficient of the user's own for a family whose model has no auxiliary loss by itself, too.
    """
    options = {**AUX, "family": family, "mask_truncated_completions": True}
    stock = run_trainer(GRPOTrainer, GRPOConfig, tmp_path / "stock", **options)
    tree = run_trainer(TreeGRPOTrainer, TreeGRPOConfig, tmp_path / "tree", **SHARED, **options)
    assert_same_training(stock, tree, family=family)
    for log in tree[1][:-1]:
        assert log["aux_loss"] > 1 and log["tree/microbatches"] > 1 and log["tree/sharing_ratio"] > 1.3
        assert log["tree/scoring_needed_by/router_aux_loss"] == 1


@pytest.mark.exhaustive
def test_evaluation_and_checkpointing(tmp_path):
    """Evaluation logs it, too; a layer that is computed twice counts once."""
    options = {**AUX, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    options |= {"gradient_checkpointing": True, "num_generations_eval": 4}
    stock = run_trainer(GRPOTrainer, GRPOConfig, tmp_path / "stock", **options)
    tree = run_trainer(TreeGRPOTrainer, TreeGRPOConfig, tmp_path / "tree", **SHARED, **options)
    assert_same_training(stock, tree, family=FAMILY)
    assert sum("eval_aux_loss" in log for log in tree[1]) == 2


@pytest.mark.exhaustive
def test_rloo(tmp_path):
    """Trainer divides RLOO's loss, the auxiliary one with it, by the accumulation steps."""
    options = {**AUX, "rollout_func": None, "max_completion_length": 12, "beta": 0.0}
    stock = run_trainer(RLOOTrainer, RLOOConfig, tmp_path / "stock", **options)
    tree = run_trainer(TreeRLOOTrainer, TreeRLOOConfig, tmp_path / "tree", **SHARED, **options)
    assert_same_training(stock, tree, family=FAMILY)


def run_sft(trainer_class, config_class, folder, **options):
    """Three SGD steps on turns of conversations."""
    model = shallow_model(FAMILY, dtype=torch.float64, seed=1)
    trainer = trainer_class(
        model,
        config_class(**sft_arguments(folder, router_aux_loss_coef=0.3, **options)),
        train_dataset=texts("weight"),
        eval_dataset=texts("weight").select(range(3)),
        processing_class=recorded.tokenizer(),
    )
    with float64_everywhere(model):
        trainer.train()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, trainer.state.log_history, trainer


@pytest.mark.exhaustive
def test_sft(tmp_path):
    """What stands after a row's last label counts, as it does in TRL; evaluation included."""
    options = {"eval_strategy": "steps", "eval_steps": 1}
    stock = run_sft(SFTTrainer, SFTConfig, tmp_path / "stock", **options)
    tree = run_sft(TreeSFTTrainer, TreeSFTConfig, tmp_path / "tree", tree_max_tokens_per_microbatch=96, **options)
    assert_same_training(stock, tree, family=FAMILY)
    assert tree[1][0]["tree/scoring_needed_by/router_aux_loss"] == 1


@pytest.mark.exhaustive
def test_global_scope(tmp_path):
    """Two micro-steps pooled are TRL's one micro-step of all their rows, for a loss that is a mean over the step."""
    stock = run_trainer(
        GRPOTrainer,
        GRPOConfig,
        tmp_path / "stock",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        **AUX,
    )
    options = {**SHARED, **AUX, "tree_aux_scope": "global"}
    tree = run_trainer(TreeGRPOTrainer, TreeGRPOConfig, tmp_path / "tree", **options)
    assert tree[2].args.gradient_accumulation_steps == 2
    largest = max(value.abs().max() for value in moved(stock).values())
    for name, value in stock[0].items():
        assert (tree[0][name] - value).abs().max() < RELATIVE_TOLERANCE * largest, name
    for one, other in zip(stock[1][:-1], tree[1][:-1], strict=True):
        assert other["aux_loss"] == pytest.approx(one["aux_loss"], rel=RELATIVE_TOLERANCE)
    with pytest.raises(ValueError, match="tree_aux_scope to be one of slice, global, got 'step'"):
        TreeGRPOConfig(output_dir=str(tmp_path), tree_aux_scope="step", use_cpu=True)
    for config, wrong in ((TreeGRPOConfig, float("nan")), (TreeSFTConfig, "0.1"), (TreeGRPOConfig, -0.1)):
        with pytest.raises(ValueError, match="router_aux_loss_coef to be a finite number of at least 0, or None, got"):
            config(output_dir=str(tmp_path), router_aux_loss_coef=wrong, use_cpu=True)


@pytest.mark.exhaustive
def test_gmpo(tmp_path):
    """TRL's loss leaves it out and says nothing; here it is said."""
    stock = run_trainer(GMPOTrainer, GMPOConfig, tmp_path / "stock", max_steps=1, **AUX)
    with pytest.warns(HartsWarning, match=r"router_aux_loss_coef=0.3 has no effect: GMPO"):
        tree = run_trainer(TreeGMPOTrainer, TreeGMPOConfig, tmp_path / "tree", max_steps=1, **SHARED, **AUX)
    assert_same_training(stock, tree, family=FAMILY)
    assert "aux_loss" not in tree[1][0]


@pytest.mark.exhaustive
def test_episodes(tmp_path, monkeypatch):
    """Episodes of different numbers of samples: it is neither weighted nor scaled, so it adds the same to a step."""
    monkeypatch.setattr(episode_runs, "FAMILY", FAMILY)
    coefficient, added = 0.3, []
    for weight in ("sample", "episode"):
        options = {"max_steps": 1, "tree_episode_weight": weight}
        without = episode_runs.run_on_episodes(tmp_path / weight, router_aux_loss_coef=0.0, **options)
        run = episode_runs.run_on_episodes(tmp_path / f"{weight}-aux", router_aux_loss_coef=coefficient, **options)
        added.append({name: value - without.parameters[name] for name, value in run.parameters.items()})
        more = run.logs[0]["loss"] - without.logs[0]["loss"]
        assert more == pytest.approx(coefficient * run.logs[0]["aux_loss"], rel=1e-5)
    largest = max(value.abs().max() for value in added[0].values())
    assert largest > 1e-4
    for name, value in added[0].items():
        assert (added[1][name] - value).abs().max() < RELATIVE_TOLERANCE * largest, name


def test_trainers_without_a_place_for_it(tmp_path, monkeypatch):
    """A trainer whose loss would leave it out refuses the coefficient before anything is trained."""
    monkeypatch.setattr(TreeGRPOTrainer, "router_loss", "refused")
    with pytest.raises(UnsupportedModelError, match=r"auxiliary loss of the router.*router_aux_loss_coef=0"):
        run_trainer(TreeGRPOTrainer, TreeGRPOConfig, tmp_path, **AUX)
