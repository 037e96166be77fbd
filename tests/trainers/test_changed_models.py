"""A policy that is changed inside an optimizer step: the trainer stops instead of taking the step."""

import pytest
from support.trainer_runs import run_trainer

from harts_hf import TreeGRPOConfig, TreeGRPOTrainer
from harts_hf.runtime import ModelChangedError


class Meddling(TreeGRPOTrainer):
    """Scales the head while the loss is computed, between the scoring pass and the backwards."""

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        self.model.lm_head.weight.data.mul_(1.5)
        return loss


@pytest.mark.essential("64-replay")
@pytest.mark.parametrize("execution", ["replay", "keep"])
@pytest.mark.parametrize("budget", [64, 4096])
def test_policy_changed_inside_a_step(execution, budget, tmp_path):
    """Windows of several microbatches and of one."""
    options = {"tree_sharing": "always", "tree_execution": execution, "tree_max_tokens_per_microbatch": budget}
    with pytest.raises(ModelChangedError, match=r"values of lm_head\.weight were replaced"):
        run_trainer(Meddling, TreeGRPOConfig, tmp_path, max_steps=1, **options)
