"""docs/environments.md: its blocks run in order, as they stand, and what they make can be trained."""

import re
from pathlib import Path

import pytest
from datasets import Dataset
from support.models import tiny_model
from support.scripted import chat_tokenizer

import harts_hf
from harts_hf import TreeGRPOConfig, TreeGRPOTrainer
from harts_hf.rollouts import TreeRolloutCollector, environment_reward

PAGE = Path(harts_hf.__file__).parents[1] / "docs" / "environments.md"


@pytest.fixture
def given(tmp_path):
    """What the page takes for granted."""
    tokenizer = chat_tokenizer()
    return {
        "tokenizer": tokenizer,
        "model": tiny_model("qwen3_5_text", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id),
        "dataset": Dataset.from_dict({"prompt": ["Guess."] * 2}),
        "args": TreeGRPOConfig(
            output_dir=str(tmp_path),
            num_generations=8,
            per_device_train_batch_size=8,
            max_completion_length=20,
            max_steps=1,
            use_cpu=True,
            bf16=False,
            activation_checkpointing=False,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
        ),
    }


def test_its_blocks_run(given):
    """One after the other; then each environment and each collector that they define takes part in a step."""
    pytest.importorskip("gymnasium")
    names, collectors = dict(given), []
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 7
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
        if "collector" in block and names["collector"] not in collectors:
            collectors.append(names["collector"])
    assert len(collectors) == 4 and names["trainer"].state.global_step == 1
    options = {"branching": (2,), "max_turns": 2, "max_turn_tokens": 4}
    collectors += [
        TreeRolloutCollector(names["Riddle"], **options),
        TreeRolloutCollector(names["lake"], chat=True, **options),
    ]
    for collector in collectors:
        trainer = TreeGRPOTrainer(
            names["model"],
            environment_reward,
            args=given["args"],
            train_dataset=given["dataset"],
            processing_class=given["tokenizer"],
            rollout_func=collector,
        )
        rows = collector(["Guess."] * 8, trainer)
        assert len(rows["completion_ids"]) == 8 and collector.last_metrics["environment/failed"] == 0


def test_its_table_of_failures_is_whole():
    """Every kind that is counted, and no other."""
    from harts_hf.rollouts.environments.failures import FAILURE_KINDS

    kinds = re.findall(r"`environment/failed/(\w+)`", PAGE.read_text())
    assert sorted(kinds) == sorted(FAILURE_KINDS)
