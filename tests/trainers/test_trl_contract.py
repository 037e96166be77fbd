"""Every loss and option of TRL: two SGD steps on recorded rollouts equal stock TRL's, parameters and metrics.

A new TRL release must pass this file. The budget is in support.trainer_runs. The entropy quantiles are chosen so that
their threshold does not fall on a shared token: its occurrences have one entropy in the tree, and entropies apart by
rounding in stock TRL, where that rounding then decides which of them are above.
"""

import pytest
from support import recorded
from support.trainer_runs import assert_same_training, run_trainer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from harts_hf import (
    TreeGMPOConfig,
    TreeGMPOTrainer,
    TreeGRPOConfig,
    TreeGRPOTrainer,
    TreeRLOOConfig,
    TreeRLOOTrainer,
)

LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
OPTIONS = {
    **{f"loss-{name}": {"loss_type": name} for name in LOSSES},
    **{
        f"off-policy-{name}": {"loss_type": name, "num_iterations": 2, "epsilon": 0.01, "learning_rate": 0.5}
        for name in LOSSES
    },
    "sequence-level": {"importance_sampling_level": "sequence", "loss_type": "grpo", "num_iterations": 2},
    "reference-model": {"beta": 0.1, "num_iterations": 2, "max_steps": 3},
    "reference-biased-kl": {"beta": 0.1, "use_bias_correction_kl": False},
    "more-steps-per-generation": {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "max_steps": 3},
    "fewer-steps-per-generation": {"steps_per_generation": 1, "gradient_accumulation_steps": 2},
    "entropy-bonus": {"entropy_coef": 0.05},
    "top-entropy-quantile": {"top_entropy_quantile": 0.6},
    "quantile-and-bonus": {"top_entropy_quantile": 0.8, "entropy_coef": 0.05},
    "adaptive-entropy": {
        "use_adaptive_entropy": True,
        "entropy_target": 3.7,
        "entropy_coef_delta": 0.01,
        "entropy_coef_max": 0.1,
    },
    "off-policy-mask": {"off_policy_mask_threshold": 0.1, "num_iterations": 2, "learning_rate": 0.5},
    "delta-clip": {"delta": 1.05, "num_iterations": 2, "learning_rate": 0.5},
    "masked-truncation": {"mask_truncated_completions": True},
    "no-tool-mask": {"rollout_func": recorded.rollout_func_without_mask},
    "unscaled-rewards": {"scale_rewards": "none"},
    "remainder-step": {"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 5},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4},
    "checkpointing": {"gradient_checkpointing": True},
    "clipped-gradients": {"max_grad_norm": 0.05},
}
# LUSPO's loss is a sum over tokens: smaller steps.
OPTIONS["loss-luspo"]["learning_rate"] = OPTIONS["off-policy-luspo"]["learning_rate"] = 0.002


@pytest.mark.essential("loss-grpo", "off-policy-grpo")
@pytest.mark.parametrize("name", OPTIONS)
def test_grpo(name, tmp_path):
    """TreeGRPOTrainer trains as GRPOTrainer does; each loss also on trees that are cut, without scoring them first."""
    stock = run_trainer(GRPOTrainer, GRPOConfig, tmp_path / "stock", **OPTIONS[name])
    cut = {"tree_max_tokens_per_microbatch": 64} if name.startswith("loss-") else {}
    options = {"tree_sharing": "always", **cut, **OPTIONS[name]}
    tree = run_trainer(TreeGRPOTrainer, TreeGRPOConfig, tmp_path / "tree", **options)
    assert_same_training(stock, tree)
    if cut:
        assert all(log["tree/microbatches"] > 1 and log["tree/scoring_skipped"] == 1 for log in tree[1][:-1])


@pytest.mark.essential("off-policy")
@pytest.mark.parametrize(
    "options", [{}, {"num_iterations": 2, "epsilon": 0.01, "beta": 0.1}], ids=["plain", "off-policy"]
)
def test_gmpo(options, tmp_path):
    """TreeGMPOTrainer trains as GMPOTrainer does."""
    stock = run_trainer(GMPOTrainer, GMPOConfig, tmp_path / "stock", **options)
    tree = run_trainer(TreeGMPOTrainer, TreeGMPOConfig, tmp_path / "tree", tree_sharing="always", **options)
    assert_same_training(stock, tree)


class RecordedGeneration:
    """RLOO knows no rollout function: plays the recorded rollouts back in its place."""

    def _generate(self, prompts):
        output = recorded.rollout_func(prompts, self)
        completions = self.processing_class.batch_decode(output["completion_ids"])
        return output["prompt_ids"], output["completion_ids"], completions


class RecordedRLOO(RecordedGeneration, RLOOTrainer):
    """Stock."""


class RecordedTreeRLOO(RecordedGeneration, TreeRLOOTrainer):
    """Ours."""


@pytest.mark.essential("plain")
@pytest.mark.parametrize(
    "options", [{}, {"num_iterations": 2, "epsilon": 0.05, "beta": 0.1}], ids=["plain", "off-policy"]
)
def test_rloo(options, tmp_path):
    """TreeRLOOTrainer trains as RLOOTrainer does (its loss is not scaled for accumulation by itself)."""
    options = {"rollout_func": None, "beta": 0.0, **options}
    stock = run_trainer(RecordedRLOO, RLOOConfig, tmp_path / "stock", **options)
    tree = run_trainer(RecordedTreeRLOO, TreeRLOOConfig, tmp_path / "tree", tree_sharing="always", **options)
    assert_same_training(stock, tree)


class TokenAdvantages(GRPOTrainer):
    """Stock GRPO with (B, T) advantages attached to the batch, as TRL's subclasses do."""

    def __init__(self, *args, rollout_func, **kwargs):
        def without_advantages(prompts, trainer):
            output = rollout_func(prompts, trainer)
            self.kept = output.pop("advantages")
            return output

        super().__init__(*args, rollout_func=without_advantages, **kwargs)

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        advantages = output["completion_ids"].new_zeros(output["completion_ids"].shape).float()
        for row, values in enumerate(self.kept):
            advantages[row, : len(values)] = advantages.new_tensor(values)
        output["advantages"] = advantages
        return output


@pytest.mark.exhaustive
def test_token_advantages(tmp_path):
    """Advantages of shape (B, T) that a rollout function returns reach the loss; shared tokens get the sum."""
    options = {"rollout_func": recorded.rollout_func_with_advantages}
    stock = run_trainer(TokenAdvantages, GRPOConfig, tmp_path / "stock", **options)
    tree = run_trainer(TreeGRPOTrainer, TreeGRPOConfig, tmp_path / "tree", tree_sharing="always", **options)
    assert_same_training(stock, tree)
