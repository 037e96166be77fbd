"""Names that Transformers has given up are not read on our behalf: no user is warned of what he does not do."""

import warnings

import pytest
from peft import LoraConfig
from support.trainer_runs import run_trainer
from transformers import PreTrainedModel

from harts_hf import TreeGRPOConfig, TreeGRPOTrainer, TreeRLOOConfig, TreeRLOOTrainer

GRPO, RLOO = (TreeGRPOTrainer, TreeGRPOConfig), (TreeRLOOTrainer, TreeRLOOConfig)
LORA = {"peft_config": LoraConfig(target_modules=["q_proj", "v_proj"], lora_dropout=0.0)}


@pytest.mark.parametrize(
    ("kind", "options"),
    [(GRPO, {}), (RLOO, {"beta": 0.0}), (GRPO, LORA)],
    ids=["grpo", "rloo", "lora"],
)
def test_trl_generates_without_warnings(kind, options, tmp_path):
    """TRL's own generation, around which checkpointing is off, and on again afterwards."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        given = {"rollout_func": None, "max_completion_length": 4, "max_steps": 1, "gradient_checkpointing": True}
        _, logs, trainer = run_trainer(*kind, tmp_path, **given, **options)
    assert logs[0]["tree/unique_tokens"] > 0
    assert not [str(one.message) for one in seen if issubclass(one.category, FutureWarning | DeprecationWarning)]
    assert trainer.accelerator.unwrap_model(trainer.model).is_activation_checkpointing
    with pytest.warns(FutureWarning, match="is_gradient_checkpointing"):
        PreTrainedModel.is_gradient_checkpointing.fget(trainer.model)
