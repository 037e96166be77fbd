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
from transformers import AutoModelForCausalLM, TrainerCallback

from harts_hf import TreeGRPOConfig, TreeGRPOTrainer, TreePPOConfig, TreePPOTrainer
from harts_hf.errors import HartsWarning, UnsupportedModelError
from harts_hf.trainers.policy import TreePolicy
from harts_hf.trainers.ppo_minibatches import deal_trees
from harts_hf.trainers.ppo_rewards import as_token_rewards, with_final_rewards
from harts_hf.trainers.ppo_rollouts import TreePPORollouts
from harts_hf.trainers.value_head import hide_from_engines


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 1.5}, "gamma to be a number in \\[0, 1\\], got 1.5"),
        ({"gamma": "0.9"}, "gamma to be a number in \\[0, 1\\], got '0.9'"),
        ({"lam": None}, "lam to be a number in \\[0, 1\\], got None"),
        ({"cliprange_value": 0}, "cliprange_value to be a finite number above 0, or None, got 0"),
        ({"epsilon_high": math.nan}, "epsilon_high to be a finite number above 0, or None, got nan"),
        ({"entropy_coef": -1}, "entropy_coef to be a finite number of at least 0, got -1"),
        ({"value_learning_rate": math.inf}, "value_learning_rate to be a finite number above 0, or None, got inf"),
        ({"vf_coef": 10**400}, "vf_coef to be a finite number"),
        ({"beta": True}, "beta to be a finite number of at least 0, got True"),
        ({"num_generations": 0}, "num_generations to be an integer of at least 1, got 0"),
        ({"num_generations": True}, "num_generations to be an integer of at least 1, got True"),
        ({"num_iterations": 0}, "num_iterations to be an integer of at least 1, got 0"),
        ({"value_warmup_steps": 1.5}, "value_warmup_steps to be an integer of at least 0, got 1.5"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps to be an integer of at least 1"),
        ({"whiten_advantages": "no"}, "whiten_advantages to be True or False, got 'no'"),
        ({"temperature": math.inf}, "temperature to be a finite number above 0"),
        ({"tree_server_timeout": "1"}, "tree_server_timeout to be a finite number above 0, got '1'"),
        ({"tree_deterministic": 2}, "tree_deterministic to be True or False, got 2"),
        ({"tree_cost": 3}, "tree_cost to be a path, or None, got 3"),
        ({"reward_weights": [math.nan]}, "reward_weights to be a list of finite numbers, or None"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor to be left at 0.0"),
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


@pytest.mark.parametrize(
    ("options", "trees"),
    [
        ({"per_device_train_batch_size": 1, "steps_per_generation": 4}, 1),
        ({"steps_per_generation": 4, "num_generations": 8}, 2),
        ({"per_device_train_batch_size": 6, "steps_per_generation": 4, "num_generations": 8}, 3),
    ],
)
def test_more_minibatches_than_trees(tmp_path, options, trees):
    """Some would be empty, and momentum would move weights in their steps."""
    options = {**options, "gradient_accumulation_steps": 1}
    with pytest.raises(ValueError, match=f"at most {trees}, the trees .*got 4 minibatches"):
        TreePPOConfig(**recorded.arguments(tmp_path, **options))
    fewer = {**options, "steps_per_generation": 4, "gradient_accumulation_steps": 4}
    assert TreePPOConfig(**recorded.arguments(tmp_path, **fewer)).num_minibatches == 1


def test_trees_on_two_processes(tmp_path, monkeypatch):
    """What counts is the process with most: six rollouts each, of trees of four, are two trees on both."""
    monkeypatch.setattr(TreePPOConfig, "world_size", 2)
    options = {"per_device_train_batch_size": 3, "steps_per_generation": 2, "gradient_accumulation_steps": 1}
    assert TreePPOConfig(**recorded.arguments(tmp_path, **options)).num_minibatches == 2
    with pytest.raises(ValueError, match="at most 2, the trees"):
        options = {"per_device_train_batch_size": 2, "steps_per_generation": 3, "gradient_accumulation_steps": 1}
        TreePPOConfig(**recorded.arguments(tmp_path, **options))


@pytest.mark.parametrize("with_value_model", [False, True])
def test_steps_of_nothing_change_nothing(tmp_path, with_value_model):
    """A minibatch whose episodes have no reward leaves weights as they are, whatever momentum and decay would do."""

    def first_only(completions, **more):
        return [1.0 if trainer.state.global_step == 0 else None for _ in completions]

    extra = {"value_model": tiny_model("qwen3_next", dtype=torch.float64, seed=5)} if with_value_model else {}
    options = {"optim": "adamw_torch", "weight_decay": 0.1, "max_steps": 2, "gradient_accumulation_steps": 1}
    trainer = build_trainer(tmp_path, RaggedRollouts(), **options, **extra)
    trainer.reward_funcs, trainer.reward_func_names = [first_only], ["first_only"]
    modules = [trainer.model, *extra.values()]
    start = [parameter.detach().clone() for module in modules for parameter in module.parameters()]
    kept = []

    class Keeps(TrainerCallback):
        def on_step_end(self, args, state, control, **more):
            kept.append([parameter.detach().clone() for module in modules for parameter in module.parameters()])

    trainer.add_callback(Keeps())
    with pytest.warns(HartsWarning, match="no trained token on any process .* its step changes nothing"):
        train(trainer)
    assert not all(map(torch.equal, start, kept[0]))
    assert all(map(torch.equal, kept[0], kept[1]))
    logs = [entry for entry in trainer.state.log_history if "trained_tokens" in entry]
    assert [entry["trained_tokens"] > 0 for entry in logs] == ["ratio" in entry for entry in logs] == [True, False]


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
    tensors = [torch.tensor([1.0, 2, 4, 8, 0, 16], dtype=torch.bfloat16), np.array([0, 0, 1], np.int8)]
    assert as_token_rewards({**rows, "token_rewards": tensors})["token_rewards"] == found["token_rewards"]
    assert as_token_rewards(rows) == rows


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"turn_rewards": [[1.0]]}, "to have 2 entries, one per turn of the policy, got 1"),
        ({"turn_rewards": [[1.0, math.nan]]}, "finite numbers in turn_rewards\\[0\\], got nan at position 1"),
        ({"turn_rewards": [1.0]}, "turn_rewards\\[0\\] to be a list of finite numbers, got 1.0"),
        ({"turn_rewards": 1.0}, "'turn_rewards' to be a list of 1 entries, one per row, got 1.0"),
        ({"turn_rewards": [None]}, "turn_rewards\\[0\\] to be a list of finite numbers, got None"),
        ({"token_rewards": [[0, "a", 0, 0]]}, "finite numbers in token_rewards\\[0\\], got 'a' at position 1"),
        ({"token_rewards": ["abcd"]}, "token_rewards\\[0\\] to be a list of finite numbers, got 'abcd'"),
        ({"token_rewards": torch.zeros(1, 4, 1)}, "token_rewards\\[0\\] to be a list of finite numbers"),
        ({"token_rewards": [[1.0, 1.0]]}, "to have 4 entries, one per completion token, got 2"),
        ({"token_rewards": [[1.0, 0, 0, 0]]}, "no reward before the first turn"),
        ({"token_rewards": []}, "'token_rewards' to be a list of 1 entries, one per row, got \\[\\]"),
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
        ({"truncated": [True]}, "'truncated' to have 8 entries, one per row"),
        (
            {"token_rewards": lambda output: [[1e200 * own for own in row] for row in output["env_mask"]]},
            "rewards whose sums stay below .* got .*e\\+20",
        ),
        ({"truncated": True}, "'truncated' to be a list of 8 of true and false, one per prompt, got True"),
        ({"truncated": [None] * 8}, "'truncated' to be a list of 8 of true and false"),
        ({"truncated": torch.zeros(8, 2, dtype=torch.bool)}, "'truncated' to be a list of 8 of true and false"),
    ],
)
def test_rollouts_that_do_not_fit(tmp_path, given, message):
    """Each is named."""

    def change(output):
        output.update({key: value(output) if callable(value) else value for key, value in given.items()})
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


def test_data_that_fills_no_batch(tmp_path):
    """Trainer would end at step 0 and say nothing of it."""
    options = {"per_device_train_batch_size": 16, "num_generations": 1}
    with pytest.raises(ValueError, match=r"at least 32 rows of train_dataset \(generation_batch_size=32 / .* got 12"):
        train(build_trainer(tmp_path, RaggedRollouts(), **options))


def test_a_reference_that_cannot_be_loaded(tmp_path):
    """TRL would ask the Hub for a model without a name."""
    options = recorded.arguments(tmp_path, beta=0.1)
    with pytest.raises(ValueError, match=r"loaded with from_pretrained for beta=0.1 .* made in memory"):
        TreePPOTrainer(tiny_model("qwen3_5_text"), recorded.recorded_reward, args=TreePPOConfig(**options),
                       train_dataset=recorded.dataset(), processing_class=recorded.tokenizer())  # fmt: skip


def test_where_episodes_were_cut(tmp_path):
    """A tensor says the same as a list; reward functions get each row's entry."""
    seen = []

    def watch(completions, truncated, **more):
        seen.append(truncated)
        return [0.0] * len(completions)

    for truncated in (torch.arange(8) % 2 == 0, [1, 0] * 4):
        trainer = build_trainer(tmp_path, RaggedRollouts(change=lambda out, t=truncated: out.update(truncated=t)),
                                max_steps=1)  # fmt: skip
        trainer.reward_funcs, trainer.reward_func_names = [watch], ["watch"]
        train(trainer)
        assert trainer._truncated == [True, False] * 4
    assert seen == [[True, False] * 4] * 2


def test_without_a_reward_function(tmp_path):
    """No episode would have a reward, and none be trained."""
    with pytest.raises(ValueError, match="expected a reward function"):
        TreePPOTrainer(tiny_model("qwen3_5_text"), [], args=TreePPOConfig(**recorded.arguments(tmp_path)))


@pytest.mark.parametrize(
    ("value_model", "message"),
    [
        ("/nonexistent", "or where to load one from, got '/nonexistent'"),
        (torch.nn.Linear(2, 2), "causal language model of a supported family, .* got a Linear"),
        (3, "got 3"),
    ],
)
def test_what_is_no_value_model(tmp_path, value_model, message):
    """Named before the policy is looked at."""
    with pytest.raises(ValueError, match=message):
        TreePPOTrainer("/nowhere", recorded.recorded_reward, args=TreePPOConfig(**recorded.arguments(tmp_path)),
                       train_dataset=recorded.dataset(), value_model=value_model)  # fmt: skip


def test_a_value_model_that_does_not_fit(tmp_path):
    """The policy itself, or one that has a part of it; another vocabulary; a backend that shards."""
    policy = tiny_model("qwen3_5_text", seed=2)
    tied = tiny_model("qwen3_5_text", seed=3)
    tied.lm_head = policy.lm_head
    for value_model in (policy, tied):
        with pytest.raises(
            ValueError, match="a value_model with parameters of its own, got one that has the policy's"
        ):
            TreePPOTrainer(policy, recorded.recorded_reward, args=TreePPOConfig(**recorded.arguments(tmp_path)),
                           train_dataset=recorded.dataset(), processing_class=recorded.tokenizer(),
                           value_model=value_model)  # fmt: skip
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


def test_an_optimizer_that_was_made_before(tmp_path):
    """It knows no value head, which would stay as it is; a schedule of its groups cannot go on with more of them."""
    trainer = build_trainer(tmp_path, RaggedRollouts(), max_steps=1)
    policy = [p for name, p in trainer.model.named_parameters() if not name.startswith("critic.")]
    trainer.optimizer = torch.optim.SGD(policy, lr=0.05)
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda step: 1.0)
    with pytest.raises(ValueError, match=r"optimizers=\(optimizer, None\).* got a schedule with it \(LambdaLR"):
        train(trainer)
    trainer.lr_scheduler = None
    head = trainer._tree.head.weight.detach().clone()
    train(trainer)
    assert not torch.equal(trainer._tree.head.weight, head)
    groups = len(trainer.optimizer.param_groups)
    assert trainer.create_optimizer() is trainer.optimizer and len(trainer.optimizer.param_groups) == groups


@pytest.mark.parametrize("trained", ["policy", "adapters", "nothing"])
def test_the_values_rate(trained, tmp_path):
    """All of the head learns at it, whatever else of the model is trained; another time, too."""
    lora = LoraConfig(r=2, target_modules=["q_proj"]) if trained == "adapters" else None
    trainer = build_trainer(tmp_path, RaggedRollouts(), peft_config=lora, value_learning_rate=0.04)
    if trained == "nothing":
        for name, parameter in trainer.model.named_parameters():
            parameter.requires_grad_("critic" in name)
    for optimizer in (trainer.create_optimizer(), trainer.create_optimizer()):
        rates = {id(one): group["lr"] for group in optimizer.param_groups for one in group["params"]}
        found = {name: rates[id(one)] for name, one in trainer.model.named_parameters() if one.requires_grad}
        assert found == {name: 0.04 if "critic" in name else 0.1 for name in found}


def test_deepspeeds_optimizer_has_one_rate(tmp_path):
    """The value's own would be lost."""
    trainer = build_trainer(tmp_path, RaggedRollouts(), value_learning_rate=0.1)
    plugin = SimpleNamespace(deepspeed_config={"optimizer": {"type": "AdamW"}})
    trainer.accelerator = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))
    with pytest.raises(UnsupportedModelError, match="without 'optimizer' with value_learning_rate"):
        trainer._begin_tree(TreePolicy)


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
