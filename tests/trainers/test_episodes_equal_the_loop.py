"""Two optimizer steps on episodes of nought to five samples equal the loop over samples, for every loss and option."""

import pytest
from support.episode_runs import assert_follows, followed, run_on_episodes

from harts_hf import TreeGMPOConfig, TreeGMPOTrainer

LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
DRIFT = {"num_iterations": 2, "epsilon": 0.02, "learning_rate": 0.3}
WEIGHTS = ["sample", "episode"]
# LUSPO's loss is a sum over tokens: smaller steps.
SMALL = {"learning_rate": 0.01}
OPTIONS = {
    "sequence-level": {"importance_sampling_level": "sequence", "loss_type": "grpo", **DRIFT},
    "sequence-level-luspo": {"importance_sampling_level": "sequence", "loss_type": "luspo", **DRIFT, **SMALL},
    "sequence-level-dapo": {"importance_sampling_level": "sequence", "loss_type": "dapo", **DRIFT},
    **{f"reference-{name}": {"beta": 0.1, "loss_type": name, **DRIFT} for name in ("grpo", "bnpo", "dapo")},
    "reference-biased": {"beta": 0.1, "use_bias_correction_kl": False, **DRIFT},
    **{f"entropy-{name}": {"entropy_coef": 0.5, "loss_type": name} for name in LOSSES if name != "luspo"},
    "entropy-luspo": {"entropy_coef": 0.5, "loss_type": "luspo", **SMALL},
    **{f"long-{name}": {"steps_per_generation": 4, "loss_type": name, "entropy_coef": 0.5} for name in LOSSES},
    "short-generations": {"steps_per_generation": 1, "loss_type": "dapo"},
    "many-slices": {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2, "loss_type": "bnpo"},
    **{f"truncated-{name}": {"mask_truncated_completions": True, "loss_type": name} for name in ("grpo", "dapo")},
    "delta": {"delta": 1.05, **DRIFT},
    "off-policy-mask": {"off_policy_mask_threshold": 0.1, **DRIFT},
    "unscaled": {"scale_rewards": "none"},
    "batch-scaled": {"scale_rewards": "batch"},
    "cut": {"tree_max_tokens_per_microbatch": 64, "loss_type": "grpo"},
    "unshared": {"tree_sharing": "never", "loss_type": "grpo"},
    "evaluation-of-two": {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 4,
        "num_generations_eval": 2,
    },
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8, "loss_type": "grpo"},
    "evaluation-bnpo": {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 8,
        "loss_type": "bnpo",
    },
    "evaluation-dapo": {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 8,
        "entropy_coef": 0.5,
    },
}
OPTIONS["long-luspo"]["learning_rate"] = 0.01


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("loss", LOSSES)
def test_losses(loss, weight, tmp_path):
    """Off policy, each with rows that weigh alike and episodes that do."""
    options = {"loss_type": loss, **DRIFT, **(SMALL if loss == "luspo" else {})}
    run = run_on_episodes(tmp_path, tree_episode_weight=weight, **options)
    assert_follows(run, followed(run))


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, weight, tmp_path):
    """What else a step's loss depends on."""
    run = run_on_episodes(tmp_path, tree_episode_weight=weight, **OPTIONS[name])
    assert_follows(run, followed(run))


@pytest.mark.parametrize("weight", WEIGHTS)
def test_gmpo(weight, tmp_path):
    """GMPO's trainer, off policy and with a reference model."""
    run = run_on_episodes(
        tmp_path,
        trainer_class=TreeGMPOTrainer,
        config_class=TreeGMPOConfig,
        tree_episode_weight=weight,
        beta=0.1,
        **DRIFT,
    )
    assert_follows(run, followed(run))


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("loss", ["grpo", "bnpo", "dapo"])
def test_a_short_last_step(loss, weight, tmp_path):
    """At the end of an epoch a step has fewer slices."""
    options = {"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 5, "steps_per_generation": 2}
    run = run_on_episodes(tmp_path, tree_episode_weight=weight, loss_type=loss, entropy_coef=0.5, **options)
    assert run.trainer.state.global_step == 3
    assert_follows(run, followed(run, accumulation=[5, 5, 2]))
