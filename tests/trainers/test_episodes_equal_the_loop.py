"""Two optimizer steps on episodes of nought to five samples equal the loop over samples, for every loss and option."""

import pytest
from support.episode_runs import assert_follows, followed, run_on_episodes

from harts_hf import TreeGMPOConfig, TreeGMPOTrainer

LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
DRIFT = {"num_iterations": 2, "epsilon": 0.02, "learning_rate": 0.3}
BONUS = {"entropy_coef": 0.5}
SEQUENCES = {"importance_sampling_level": "sequence"}
EVALUATION = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}
WEIGHED = {"tree_episode_weight": "episode"}
OPTIONS = {
    "sequence-level": {"loss_type": "grpo", **SEQUENCES, **DRIFT},
    "sequence-level-dapo": {"loss_type": "dapo", **SEQUENCES, **WEIGHED, **DRIFT, "beta": 0.1},
    "biased-kl": {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False, **WEIGHED, **DRIFT},
    "short-generations": {"steps_per_generation": 1, "per_device_train_batch_size": 4, **WEIGHED, **BONUS},
    "many-slices": {"loss_type": "bnpo", "gradient_accumulation_steps": 4, "per_device_train_batch_size": 2, **BONUS},
    "clips-and-masks": {"loss_type": "grpo", "delta": 1.05, "off_policy_mask_threshold": 0.1, **WEIGHED, **DRIFT},
    "unscaled": {"loss_type": "bnpo", "scale_rewards": "none"},
    "batch-scaled": {"loss_type": "grpo", "scale_rewards": "batch", **WEIGHED},
    "cut": {"loss_type": "grpo", "tree_max_tokens_per_microbatch": 64, "gradient_checkpointing": True},
    "unshared": {"loss_type": "bnpo", "tree_sharing": "never", **WEIGHED},
    "evaluation": {"loss_type": "grpo", **EVALUATION, **BONUS},
    "evaluation-bnpo": {"loss_type": "bnpo", **EVALUATION, **WEIGHED, **BONUS},
    "evaluation-of-two": {**EVALUATION, "per_device_eval_batch_size": 4, "num_generations_eval": 2, **WEIGHED},
}


def small_steps(loss):
    """LUSPO's loss is a sum over tokens."""
    return {"learning_rate": 0.01} if loss == "luspo" else {}


@pytest.mark.essential("bnpo")
@pytest.mark.parametrize("loss", LOSSES)
def test_samples_weigh_alike(loss, tmp_path):
    """A generation batch lasts for two steps, the second off policy; with an entropy bonus."""
    options = {"steps_per_generation": 4, "epsilon": 0.02, "learning_rate": 0.3, **BONUS, **small_steps(loss)}
    run = run_on_episodes(tmp_path, loss_type=loss, **options)
    assert_follows(run, followed(run))


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("error:Converting a tensor with requires_grad")
@pytest.mark.parametrize("loss", LOSSES)
def test_episodes_weigh_alike(loss, tmp_path):
    """Two iterations on a generation batch, the second off policy; with an entropy bonus and a reference model."""
    options = {**DRIFT, **BONUS, "beta": 0.1, **small_steps(loss)}
    run = run_on_episodes(tmp_path, loss_type=loss, tree_episode_weight="episode", **options)
    assert_follows(run, followed(run))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, tmp_path):
    """What else a step's loss depends on."""
    run = run_on_episodes(tmp_path, **{"per_device_train_batch_size": 2, **OPTIONS[name]})
    assert_follows(run, followed(run))


@pytest.mark.exhaustive
@pytest.mark.parametrize("weight", ["sample", "episode"])
def test_truncated_rows(weight, tmp_path):
    """A token that a truncated row has too is trained where it recurs: once, not never."""
    options = {"mask_truncated_completions": True, "loss_type": "grpo", "tree_episode_weight": weight}
    run = run_on_episodes(tmp_path, **options)
    assert_follows(run, followed(run))


@pytest.mark.exhaustive
@pytest.mark.parametrize("weight", ["sample", "episode"])
def test_gmpo(weight, tmp_path):
    """GMPO's trainer, off policy and with a reference model."""
    classes = {"trainer_class": TreeGMPOTrainer, "config_class": TreeGMPOConfig}
    run = run_on_episodes(tmp_path, **classes, tree_episode_weight=weight, beta=0.1, **DRIFT)
    assert_follows(run, followed(run))


@pytest.mark.exhaustive
@pytest.mark.parametrize("loss", ["bnpo", "dapo"])
def test_a_short_last_step(loss, tmp_path):
    """At the end of an epoch a step has fewer slices."""
    options = {"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 5, "steps_per_generation": 2}
    run = run_on_episodes(tmp_path, loss_type=loss, per_device_train_batch_size=2, num_generations=2, **options)
    assert run.trainer.state.global_step == 3
    assert_follows(run, followed(run, accumulation=[5, 5, 2]))
