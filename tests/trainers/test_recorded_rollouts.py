"""Training from recorded rollouts: as their policy it is stock TRL's, off-policy it is a plain loop's."""

import itertools
import json

import pytest
import torch
from support import recorded
from support.episode_oracle import advantages_of
from support.episode_runs import assert_follows, build_trainer, followed, train
from support.episodes import RaggedRollouts
from support.recordings import WatchedRecording, episodes_with_unknown, rows_of_episodes, rows_of_prompts
from support.trainer_runs import assert_same_training, run_trainer
from trl import GRPOConfig, GRPOTrainer

import harts_hf.trainers.advantages
from harts_hf import TreeGMPOConfig, TreeGMPOTrainer, TreeGRPOConfig, TreeGRPOTrainer
from harts_hf.rollouts import RecordedRollouts
from harts_hf.rollouts.credit import tree_advantages
from harts_hf.runtime import TreeUpdate
from harts_hf.trainers.hooks import TreeHooks

# Four groups, two in a step.
EPOCHS = {"max_steps": -1, "num_train_epochs": 2, "dataset": recorded.dataset().select(range(1, 5))}
DRIFT = {"num_iterations": 2, "epsilon": 0.1, "learning_rate": 0.3}


def written(folder, rows):
    path = folder / "rollouts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options", [{}, EPOCHS, {"loss_type": "grpo", **DRIFT}], ids=["two-steps", "two-epochs", "several-iterations"]
)
def test_rescored_is_stock_trl(options, tmp_path):
    """Parameters and metrics of GRPOTrainer on the same rollouts; their recorded log-probs play no part."""
    recording = RecordedRollouts(written(tmp_path, rows_of_prompts()), logprobs="rescored")
    stock = run_trainer(GRPOTrainer, GRPOConfig, tmp_path / "stock", **options)
    tree = run_trainer(
        TreeGRPOTrainer, TreeGRPOConfig, tmp_path / "tree", tree_sharing="always", rollout_func=recording, **options
    )
    assert_same_training(stock, tree)


@pytest.mark.exhaustive
def test_a_reference_is_scored_once(tmp_path, monkeypatch):
    """In the second epoch its log-probs are known, in batches of other rows: parameters and metrics of stock TRL."""
    scored = []
    stock_scored = TreeUpdate.scored

    def counted(self, *args):
        scored.append(self.model)
        return stock_scored(self, *args)

    monkeypatch.setattr(TreeUpdate, "scored", counted)
    recording = RecordedRollouts(written(tmp_path, rows_of_prompts()), logprobs="rescored")
    options = {**EPOCHS, "beta": 0.1}
    stock = run_trainer(GRPOTrainer, GRPOConfig, tmp_path / "stock", **options)
    tree = run_trainer(
        TreeGRPOTrainer, TreeGRPOConfig, tmp_path / "tree", tree_sharing="always", rollout_func=recording, **options
    )
    assert_same_training(stock, tree)
    assert len(tree[1]) - 1 == 4 and sum(model is tree[2].ref_model for model in scored) == 2


OFF_POLICY = {
    "grpo": {"loss_type": "grpo"},
    "dapo": {"loss_type": "dapo", "steps_per_generation": 4, "beta": 0.1},
    "bnpo": {"loss_type": "bnpo", **DRIFT, "entropy_coef": 0.1},
    "by-episode": {"loss_type": "grpo", "tree_episode_weight": "episode", "num_iterations": 2},
    "gmpo": {},
    "masked-truncation": {"loss_type": "grpo", "mask_truncated_completions": True},
    "two-epochs": {"loss_type": "grpo", **EPOCHS},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8, "max_steps": 1},
}


@pytest.mark.essential("grpo")
@pytest.mark.parametrize("name", OFF_POLICY)
def test_recorded_is_the_loop(name, tmp_path):
    """Ratios to the recorded log-probs, of groups with absent episodes, which weigh nothing."""
    recording = WatchedRecording(written(tmp_path, rows_of_episodes()))
    assert set(recording.group_sizes.values()) == {3, 4}
    is_gmpo = name == "gmpo"
    trainer = build_trainer(
        tmp_path / "run",
        recording,
        trainer_class=TreeGMPOTrainer if is_gmpo else TreeGRPOTrainer,
        config_class=TreeGMPOConfig if is_gmpo else TreeGRPOConfig,
        **OFF_POLICY[name],
    )
    run = train(trainer, recording.log)
    assert_follows(run, followed(run, off_policy=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("steps", [{}, {"num_iterations": 2}], ids=["scored-anew", "scored-by-trl"])
def test_unknown_log_probs(steps, tmp_path):
    """A token whose log-prob the file does not know is compared with the policy's own at generation."""
    path = written(tmp_path, rows_of_episodes(episodes_with_unknown))
    recording = WatchedRecording(path, source=episodes_with_unknown)
    run = train(build_trainer(tmp_path / "run", recording, loss_type="grpo", **steps), recording.log)
    assert_follows(run, followed(run, off_policy=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("with_adapter", [False, True])
def test_the_policy_is_not_scored_in_vain(with_adapter, tmp_path, monkeypatch):
    """Old log-probs that recorded ones replace take no forward; those of the reference model do."""
    peft = pytest.importorskip("peft") if with_adapter else None
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], lora_dropout=0.0) if peft else None
    scored = []
    score = TreeHooks._get_per_token_logps_and_entropies

    def counted(self, *args, **kwargs):
        if self._is_generating:
            scored.append(args[0])
        return score(self, *args, **kwargs)

    monkeypatch.setattr(TreeHooks, "_get_per_token_logps_and_entropies", counted)
    recording = RecordedRollouts(rows_of_prompts())
    options = {"num_iterations": 2, "max_steps": 1, "beta": 0.1, "peft_config": lora}
    _, _, trainer = run_trainer(
        TreeGRPOTrainer, TreeGRPOConfig, tmp_path, rollout_func=recording, tree_sharing="always", **options
    )
    assert len(scored) == 1 and (with_adapter or scored[0] is trainer.ref_model)


@pytest.mark.exhaustive
def test_any_rollout_function_may_be_off_policy(tmp_path):
    """What its log-probs are where nothing is trained does not matter; vLLM's correction would count them twice."""

    def change(output):
        output["off_policy"] = True
        wild = itertools.cycle([None, float("nan"), -1000.0])
        for logprobs, mask in zip(output["logprobs"], output["env_mask"], strict=True):
            logprobs[:] = [value if own else next(wild) for value, own in zip(logprobs, mask, strict=True)]

    rollouts = RaggedRollouts(change=change)
    trainer = build_trainer(tmp_path, rollouts, loss_type="grpo")
    run = train(trainer, rollouts)
    assert_follows(run, followed(run, off_policy=True))
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    output = rollouts(["p0"] * 4, trainer)
    with pytest.raises(ValueError, match="vllm_importance_sampling_correction=False with 'off_policy'"):
        trainer._checked(output, 4)


def test_absent_episodes_count_nowhere(tmp_path, monkeypatch):
    """Not in lengths that are logged, nor where the rewards below a turn are compared."""
    compared = []

    def counted(credit, trajectories, *args, **options):
        compared.append(trajectories)
        return tree_advantages(credit, trajectories, *args, **options)

    monkeypatch.setattr(harts_hf.trainers.advantages, "tree_advantages", counted)
    recording = WatchedRecording(rows_of_episodes())
    run = train(build_trainer(tmp_path, recording, max_steps=1, tree_credit="branch"), recording.log)
    (generation,) = run.rollouts.training
    present = [episode for episode in generation.episodes if not episode.is_absent]
    assert len(present) < len(generation.episodes)
    num_samples = sum(len(episode.samples) for episode in present)
    assert len(compared[0]) == num_samples
    assert run.logs[0]["completions/samples_per_episode"] == pytest.approx(num_samples / len(present))
    shortest = min(sum(map(len, (one.completion_ids for one in episode.samples))) for episode in present)
    assert 0 < run.logs[0]["completions/min_length"] <= shortest


@pytest.mark.exhaustive
def test_resuming(tmp_path):
    """A resumed run goes on as one that was never interrupted, bit for bit: what it draws depends on the step only."""
    options = {
        "num_generations": 3,
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 1,
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
    }

    def run(folder, resume=None):
        recording = RecordedRollouts(rows_of_prompts(), oversized="subsample")
        return train(build_trainer(folder, recording, **options), RaggedRollouts(), resume=resume)

    whole = run(tmp_path / "whole")
    resumed = run(tmp_path / "resumed", resume=str(tmp_path / "whole" / "checkpoint-2"))
    assert all(torch.equal(value, resumed.parameters[name]) for name, value in whole.parameters.items())


def test_trainers_check_recordings_when_they_are_made(tmp_path):
    """Before any step, and before a vLLM server is looked for."""
    recording = RecordedRollouts(rows_of_prompts())
    for options, message in (
        ({"num_generations": 2}, "at most num_generations=2 episodes"),
        ({"use_vllm": True}, "expected use_vllm=False"),
    ):
        with pytest.raises(ValueError, match=message):
            run_trainer(TreeGRPOTrainer, TreeGRPOConfig, tmp_path, rollout_func=recording, **options)


@pytest.mark.exhaustive
def test_recorded_advantages_of_rows(tmp_path):
    """An advantage per row trains as the rewards do that it was computed from, also where none are per token."""
    rows = rows_of_prompts()
    options = {"trainer_class": TreeGMPOTrainer, "config_class": TreeGMPOConfig}
    with_rewards = run_trainer(folder=tmp_path / "rewards", rollout_func=RecordedRollouts(rows), **options)
    for start in range(0, len(rows), recorded.NUM_GENERATIONS):
        group = rows[start : start + recorded.NUM_GENERATIONS]
        rewards = torch.tensor([row.pop("reward") for row in group], dtype=torch.float64)
        advantages = advantages_of(rewards, recorded.NUM_GENERATIONS, "group")
        for row, advantage in zip(group, advantages.tolist(), strict=True):
            row["advantage"] = advantage
    recording = RecordedRollouts(rows)
    assert recording.has_recorded_advantages
    with_advantages = run_trainer(folder=tmp_path / "advantages", rollout_func=recording, **options)
    for log in with_rewards[1]:
        for name in [name for name in log if "reward" in name or name.startswith("tree/")]:
            del log[name]
    assert_same_training(with_rewards, with_advantages)
