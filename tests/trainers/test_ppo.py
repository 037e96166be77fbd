"""PPO's trainer: what it refuses, how trees are dealt, what its checkpoints hold and what engines get."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from support import recorded
from support.episodes import RaggedRollouts
from support.models import tiny_model
from support.ppo_runs import build_trainer, train
from transformers import AutoModelForCausalLM

from harts_hf import TreeGRPOConfig, TreeGRPOTrainer, TreePPOConfig
from harts_hf.errors import UnsupportedModelError
from harts_hf.trainers.ppo_minibatches import deal_trees
from harts_hf.trainers.ppo_rewards import as_token_rewards, with_final_rewards
from harts_hf.trainers.ppo_rollouts import TreePPORollouts
from harts_hf.trainers.value_head import hide_from_engines


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 1.5}, "gamma in \\[0, 1\\], got 1.5"),
        ({"lam": -1}, "lam in \\[0, 1\\]"),
        ({"cliprange_value": 0}, "cliprange_value above 0"),
        ({"kl_in": "advantage"}, "one of reward, loss, got 'advantage'"),
        ({"kl_target": 1.0}, "beta above 0"),
        ({"loss_type": "grpo"}, "loss_type to be left at 'dapo'"),
        ({"tree_episode_weight": "episode"}, "left at 'sample'"),
        ({"tree_expert_bias_update_speed": 0.1}, "left at 0.0"),
        ({"steps_per_generation": 3}, "a multiple of gradient_accumulation_steps"),
        ({"episode_end": "turn"}, "one of chain, sample"),
    ],
)
def test_settings_that_cannot_work(tmp_path, options, message):
    """Each is named, before anything is sampled."""
    with pytest.raises(ValueError, match=message):
        TreePPOConfig(**recorded.arguments(tmp_path, **options))


def test_one_rollout_of_a_prompt(tmp_path):
    """GRPOConfig refuses groups of one; here they are the default, and a plain number afterwards."""
    options = recorded.arguments(tmp_path)
    del options["num_generations"]
    assert type(TreePPOConfig(**options).num_generations) is int
    with pytest.raises(ValueError, match="at least 2 generations"):
        TreeGRPOConfig(**options, num_generations=1)


def test_trees_are_dealt_anew():
    """Each tree once in an epoch, parts nearly equal; another order in the next epoch and on another process."""
    dealt = deal_trees(10, 4, (0, 7, 1))
    assert sorted(np.concatenate(dealt).tolist()) == list(range(10))
    assert [len(part) for part in dealt] == [3, 3, 2, 2]
    again = deal_trees(10, 4, (0, 7, 1))
    assert all(np.array_equal(a, b) for a, b in zip(dealt, again, strict=True))
    for key in ((0, 11, 1), (0, 7, 0), (1, 7, 1)):
        assert not np.array_equal(np.concatenate(deal_trees(10, 4, key)), np.concatenate(dealt))
    assert [len(part) for part in deal_trees(1, 3, (0,))] == [1, 0, 0]


def test_minibatches_are_whole_trees(tmp_path):
    """Over an epoch every trained row once; the trees of one step are no other's; the next epoch cuts differently."""
    trainer = build_trainer(tmp_path, RaggedRollouts(), num_iterations=3, steps_per_generation=4, max_steps=6,
                            gradient_accumulation_steps=1, num_generations=2)  # fmt: skip
    seen, step = [], trainer._tree.step

    def watched(model, num_items):
        (one,) = trainer._tree.slices
        seen.append(sorted(set(one.batch["tree"].tolist())))
        return step(model, num_items)

    trainer._tree.step = watched
    train(trainer)
    (whole,) = trainer._buffered_inputs
    assert whole["tree"].max() == 7
    epoch = [tree for trees in seen[:4] for tree in trees]
    assert sorted(epoch) == list(range(8))
    assert [len(trees) for trees in seen] == [2] * 6
    assert seen[4:] != seen[:2]


def test_rewards_of_turns_and_tokens():
    """A turn earns at its last token; what the environment's tokens earn is the turn's before them."""
    rows = {"completion_ids": [[5] * 6, [5] * 3], "env_mask": [[1, 1, 0, 0, 1, 0], [1, 1, 1]]}
    found = as_token_rewards({**rows, "turn_rewards": [[1.0, 2.0], [3.0]]})
    assert found["token_rewards"] == [[0, 1, 0, 0, 2, 0], [0, 0, 3]]
    assert "turn_rewards" not in found
    found = as_token_rewards({**rows, "token_rewards": [[1, 2, 4, 8, 0, 16], [0, 0, 1]]})
    assert found["token_rewards"] == [[1, 14, 0, 0, 16, 0], [0, 0, 1]]
    assert as_token_rewards(rows) == rows


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"turn_rewards": [[1.0]]}, "to have 2 entries, one per turn of the policy, got 1"),
        ({"turn_rewards": [[1.0, math.nan]]}, "finite numbers in turn_rewards\\[0\\], got nan"),
        ({"token_rewards": [[1.0, 1.0]]}, "to have 4 entries, one per completion token, got 2"),
        ({"token_rewards": [[1.0, 0, 0, 0]]}, "no reward before the first turn"),
        ({"token_rewards": []}, "to have 1 entries, one per row, got 0"),
        ({"token_rewards": [[0] * 4], "turn_rewards": [[0, 0]]}, "either .* got both"),
    ],
)
def test_rewards_that_do_not_fit(given, message):
    """Each is named."""
    with pytest.raises(ValueError, match=message):
        as_token_rewards({"completion_ids": [[5] * 4], "env_mask": [[0, 1, 0, 1]], **given})


def test_final_rewards():
    """In a chain the last trained token of all gets it; of samples each gets what comes after it."""
    trained = np.array([[1, 1, 0], [0, 1, 0], [0, 0, 0], [1, 0, 1]], bool)
    per_token = np.array([[0.1, 0.2, 9], [0, 0.4, 0], [0, 7, 0], [0, 0, 0.5]])
    episode, final = np.array([0, 0, 0, 2]), np.array([1.0, math.nan, 10.0])
    chained = with_final_rewards(per_token, trained, episode, final, of_samples=False)
    np.testing.assert_allclose(chained, [[0.1, 0.2, 0], [0, 1.4, 0], [0, 0, 0], [0, 0, 10.5]])
    alone = with_final_rewards(per_token, trained, episode, final, of_samples=True)
    np.testing.assert_allclose(alone, [[0.1, 1.6, 0], [0, 1.4, 0], [0, 0, 0], [0, 0, 10.5]])


def test_rewards_that_nobody_reads(tmp_path):
    """Another trainer's advantages are made of rewards per episode."""
    rollouts = RaggedRollouts(change=lambda output: output.update(token_rewards=[[0.0] for _ in output["episode"]]))
    trainer = TreeGRPOTrainer(
        tiny_model("qwen3_5_text", seed=1),
        recorded.recorded_reward,
        args=TreeGRPOConfig(**recorded.arguments(tmp_path)),
        train_dataset=recorded.dataset(),
        processing_class=recorded.tokenizer(),
        rollout_func=rollouts,
    )
    with pytest.raises(ValueError, match="expected a TreePPOTrainer for 'token_rewards', got a TreeGRPOTrainer"):
        trainer.train()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"advantages": [[0.0]]}, "no 'advantages'"),
        ({"truncated": [True]}, "'truncated' to be a list of 8"),
    ],
)
def test_rollouts_that_do_not_fit(tmp_path, given, message):
    """Each is named."""

    def change(output):
        output.update(given)
        if "advantages" in given:
            output["advantages"] = [[0.0] * len(ids) for ids in output["completion_ids"]]

    def without_key(prompts, trainer):
        output = recorded.rollout_func(prompts, trainer)
        change(output)
        return output

    with pytest.raises(ValueError, match=message):
        train(build_trainer(tmp_path, without_key))


def test_episodes_without_a_reward_are_left_out(tmp_path):
    """Nothing of them is trained, and they change no statistic."""

    def some(completions, **more):
        return [None if number % 4 == 1 else 1.0 for number in range(len(completions))]

    trainer = build_trainer(tmp_path, RaggedRollouts(), max_steps=1)
    trainer.reward_funcs, trainer.reward_func_names = [some], ["some"]
    kept = {}
    score = trainer._generate_and_score_completions

    def watched(inputs):
        kept["batch"] = score(inputs)
        return kept["batch"]

    trainer._generate_and_score_completions = watched
    train(trainer)
    batch = kept["batch"]
    by_row = batch["is_trained"].any(dim=1)
    assert not by_row[batch["episode"] % 4 == 1].any()
    assert by_row[batch["episode"] % 4 != 1].any()
    assert batch["num_items_in_batch"] == batch["is_trained"].sum()


CHECKPOINTS = {
    "save_strategy": "steps",
    "save_steps": 3,
    "max_steps": 5,
    "num_iterations": 2,
    "steps_per_generation": 4,
    "optim": "adamw_torch",
    "learning_rate": 1e-3,
    "value_learning_rate": 1e-2,
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["head", "lora", "model"])
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path, kind):
    """Bit for bit, in the middle of an epoch; the policy's files have no value head and load by themselves."""
    extra = {
        "head": lambda: {"beta": 0.1, "kl_target": 0.01, "kl_horizon": 10},
        "lora": lambda: {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])},
        "model": lambda: {"value_model": tiny_model("qwen3_next", dtype=torch.float64, seed=5)},
    }[kind]
    whole = build_trainer(tmp_path / "whole", RaggedRollouts(), **CHECKPOINTS, **extra())
    train(whole)
    resumed = build_trainer(tmp_path / "resumed", RaggedRollouts(), **CHECKPOINTS, **extra())
    train(resumed, resume=str(tmp_path / "whole" / "checkpoint-3"))
    for attribute in ("model", "value_model") if kind == "model" else ("model",):
        pairs = (getattr(trainer, attribute).named_parameters() for trainer in (whole, resumed))
        for (name, expected), (_, found) in zip(*pairs, strict=True):
            assert torch.equal(expected, found), name
    assert whole.beta == resumed.beta
    folder = tmp_path / "whole" / "checkpoint-3"
    home = folder / "value_model" if kind == "model" else folder
    assert set(load_file(home / "value_head.safetensors")) == {"critic.weight", "critic.bias"}
    if kind != "lora":
        _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(info.values())
    else:
        assert not any("critic" in name for name in load_file(folder / "adapter_model.safetensors"))
    (folder / "value_model" / "config.json" if kind == "model" else home / "value_head.safetensors").unlink()
    marker = json.loads((folder / "harts_checkpoint.json").read_text())
    marker["bytes"] = {name: size for name, size in marker["bytes"].items() if (folder / name).is_file()}
    (folder / "harts_checkpoint.json").write_text(json.dumps(marker))
    with pytest.raises((ValueError, RuntimeError)):
        resumed.train(resume_from_checkpoint=str(folder))


def test_engines_get_no_value_head(tmp_path):
    """What TRL walks to send weights to vLLM lacks the head alone, also of adapters."""
    trainer = build_trainer(tmp_path, RaggedRollouts(), peft_config=LoraConfig(r=4, target_modules=["q_proj"]))
    trainer.vllm_generation = SimpleNamespace(_iter_named_params=trainer.model.named_parameters)
    hide_from_engines(trainer)
    every = {name for name, _ in trainer.model.named_parameters()}
    sent = {name for name, _ in trainer.vllm_generation._iter_named_params()}
    assert every - sent == {"base_model.model.critic.weight", "base_model.model.critic.bias"}


def test_trl_walks_what_is_hidden():
    """Contract: ``VLLMGeneration.sync_weights`` sends what ``_iter_named_params`` gives, looked up on the object."""
    from trl.generation.vllm_generation import VLLMGeneration

    names = VLLMGeneration.sync_weights.__code__.co_names
    assert "_iter_named_params" in names
    assert not {"named_parameters", "state_dict"} & set(names)


def test_a_value_model_that_does_not_fit(tmp_path):
    """Another vocabulary; a backend that shards."""
    other = tiny_model("qwen3_5_text", seed=2, vocab_size=50)
    with pytest.raises(ValueError, match="the policy's vocabulary of 48, got 50"):
        build_trainer(tmp_path, RaggedRollouts(), value_model=other)
    trainer = build_trainer(tmp_path, RaggedRollouts())
    trainer.value_model = tiny_model("qwen3_5_text", seed=2)
    trainer.accelerator = SimpleNamespace(distributed_type=SimpleNamespace(value="FSDP"))
    from accelerate.utils import DistributedType

    trainer.accelerator.distributed_type = DistributedType.FSDP
    with pytest.raises(UnsupportedModelError, match="under FSDP, got a value_model"):
        trainer._begin_value_model()


def test_evaluation(tmp_path):
    """The same loss on the evaluation's rollouts, logged with its metrics."""
    trainer = build_trainer(
        tmp_path, RaggedRollouts(), eval_dataset=recorded.dataset().select(range(2)), eval_strategy="steps",
        eval_steps=1, max_steps=1, per_device_eval_batch_size=8,
    )  # fmt: skip
    train(trainer)
    (found,) = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert found["eval_ratio"] == pytest.approx(1.0)
    assert found["eval_loss"] == pytest.approx(found["eval_policy_loss"] + 0.1 * found["eval_value_loss"], rel=1e-5)
    assert math.isfinite(found["eval_explained_variance"])


def test_the_kl_coefficient_stays_positive():
    """However many episodes a generation batch has: a negative one would reward divergence."""
    settings = SimpleNamespace(args=SimpleNamespace(kl_target=1.0, kl_horizon=1))
    assert TreePPORollouts._adapted(settings, 0.1, 0.0, 8.0) == pytest.approx(0.08)
    assert TreePPORollouts._adapted(settings, 0.1, 5.0, 8.0) == pytest.approx(0.12)
    settings.args.kl_horizon = 80
    assert TreePPORollouts._adapted(settings, 0.1, 0.0, 8.0) == pytest.approx(0.1 * (1 - 0.2 * 8 / 80))
