"""bf16 autocast over float32 weights, TRL's default: every family trains as stock TRL does, to bfloat16."""

import pytest
from support import recorded
from support.models import FAMILIES, tiny_model
from trl import GRPOConfig, GRPOTrainer

from harts_hf import TreeGRPOConfig, TreeGRPOTrainer


def first_log(trainer_class, config_class, folder, family, **options):
    """The first step's log of a float32 model under bf16 autocast."""
    arguments = recorded.arguments(folder, bf16=True, max_steps=1, gradient_checkpointing=True, **options)
    trainer = trainer_class(
        tiny_model(family, seed=1),
        recorded.recorded_reward,
        args=config_class(**arguments),
        train_dataset=recorded.dataset(),
        processing_class=recorded.tokenizer(),
        rollout_func=recorded.rollout_func,
    )
    trainer.train()
    return trainer.state.log_history[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_autocast(family, tmp_path):
    """Loss, entropy and gradient norm agree within bfloat16's rounding (2^-8) of a model of three layers."""
    aux = {"router_aux_loss_coef": 0.1} if hasattr(tiny_model(family).config, "router_aux_loss_coef") else {}
    stock = first_log(GRPOTrainer, GRPOConfig, tmp_path / "stock", family, **aux)
    options = {"tree_sharing": "always", "tree_max_tokens_per_microbatch": 64}
    tree = first_log(TreeGRPOTrainer, TreeGRPOConfig, tmp_path / "tree", family, **options, **aux)
    assert tree["tree/sharing_ratio"] > 1.3
    assert tree["loss"] == pytest.approx(stock["loss"], abs=2e-3)
    assert not aux or tree["aux_loss"] == pytest.approx(stock["aux_loss"], rel=5e-3)
    assert tree["entropy"] == pytest.approx(stock["entropy"], rel=1e-2)
    assert tree["grad_norm"] == pytest.approx(stock["grad_norm"], rel=3e-2)
