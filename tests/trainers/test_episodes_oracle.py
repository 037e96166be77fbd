"""The loop over samples equals stock TRL where every episode has one sample; so it may judge where they have more."""

import pytest
from support.episode_runs import assert_follows, followed, run_on_episodes
from support.episodes import RaggedRollouts, first_samples
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

DRIFT = {"num_iterations": 2, "epsilon": 0.02, "learning_rate": 0.3}
OPTIONS = {
    "bnpo": {"loss_type": "bnpo", "entropy_coef": 0.5, "beta": 0.1, **DRIFT},
    "dapo": {"loss_type": "dapo", "steps_per_generation": 4, "entropy_coef": 0.5},
    "vespo": {"loss_type": "vespo", "scale_rewards": "batch", **DRIFT},
    "sapo": {"loss_type": "sapo", "mask_truncated_completions": True, "off_policy_mask_threshold": 0.1, **DRIFT},
    "sequence-level": {"importance_sampling_level": "sequence", "loss_type": "grpo", "delta": 1.02, **DRIFT},
    "gmpo": {**DRIFT, "beta": 0.1},
}


@pytest.mark.essential("bnpo")
@pytest.mark.parametrize("name", OPTIONS)
def test_the_loop_is_trl(name, tmp_path):
    """Parameters, losses and metrics of stock trainers on one sample an episode."""
    classes = (GMPOTrainer, GMPOConfig) if name == "gmpo" else (GRPOTrainer, GRPOConfig)
    run = run_on_episodes(
        tmp_path,
        RaggedRollouts(source=first_samples, with_key=False),
        trainer_class=classes[0],
        config_class=classes[1],
        per_device_train_batch_size=2,
        **OPTIONS[name],
    )
    assert_follows(run, followed(run))
