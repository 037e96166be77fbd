"""The loop over samples equals stock TRL where every episode has one sample; so it may judge where they have more."""

import pytest
from support.episode_runs import assert_follows, followed, run_on_episodes
from support.episodes import RaggedRollouts, first_samples
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
DRIFT = {"num_iterations": 2, "epsilon": 0.02, "learning_rate": 0.3}
# LUSPO's loss is a sum over tokens: smaller steps.
SMALL = {"learning_rate": 0.01}
OPTIONS = {
    **{f"drift-{name}": {"loss_type": name, **DRIFT, **(SMALL if name == "luspo" else {})} for name in LOSSES},
    "gmpo": {**DRIFT, "beta": 0.1},
    "sequence-level": {"importance_sampling_level": "sequence", "loss_type": "grpo", **DRIFT},
    "sequence-level-luspo": {"importance_sampling_level": "sequence", "loss_type": "luspo", **DRIFT, **SMALL},
    "reference": {"beta": 0.1, "loss_type": "grpo", **DRIFT},
    "reference-biased": {"beta": 0.1, "use_bias_correction_kl": False, **DRIFT},
    "entropy": {"entropy_coef": 0.05, "loss_type": "grpo"},
    "entropy-bnpo": {"entropy_coef": 0.05, "loss_type": "bnpo"},
    "entropy-dapo": {"entropy_coef": 0.05, "loss_type": "dapo"},
    "long-generations": {"steps_per_generation": 4, "loss_type": "dapo"},
    "truncated": {"mask_truncated_completions": True, "loss_type": "grpo"},
    "delta": {"delta": 1.05, **DRIFT},
    "off-policy-mask": {"off_policy_mask_threshold": 0.1, **DRIFT},
    "unscaled": {"scale_rewards": "none"},
    "batch-scaled": {"scale_rewards": "batch"},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8},
}


@pytest.mark.essential("drift-dapo", "gmpo")
@pytest.mark.parametrize("name", OPTIONS)
def test_the_loop_is_trl(name, tmp_path):
    """Parameters, losses and metrics of stock trainers on one sample an episode."""
    classes = (GMPOTrainer, GMPOConfig) if name == "gmpo" else (GRPOTrainer, GRPOConfig)
    run = run_on_episodes(
        tmp_path,
        RaggedRollouts(source=first_samples, with_key=False),
        trainer_class=classes[0],
        config_class=classes[1],
        **OPTIONS[name],
    )
    assert_follows(run, followed(run))
