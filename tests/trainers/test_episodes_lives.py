"""Trainings on episodes from end to end: resumed, with credit per turn, with calls that differ, and refused ones."""

import pytest
import torch
from support.episode_runs import assert_follows, build_trainer, followed, run_on_episodes, train
from support.episodes import Episode, RaggedRollouts, Sample, first_samples
from support.models import VOCAB
from support.trainer_runs import TIMED

from harts_hf import TreeGRPOConfig, TreeGRPOTrainer, TreeRLOOConfig, TreeRLOOTrainer, UnsupportedModelError


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options",
    [{"tree_episode_weight": "episode"}, {"num_iterations": 2, "epsilon": 0.02, "loss_type": "grpo"}],
    ids=["weighed", "iterations"],
)
def test_resumed_run_equals_the_uninterrupted_one(options, tmp_path):
    """Bit for bit, from a checkpoint at the end of a generation batch."""
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, **options}
    whole = run_on_episodes(tmp_path, **options)
    rollouts = RaggedRollouts()
    trainer = build_trainer(tmp_path / "resumed", rollouts, **options)
    resumed = train(trainer, rollouts, resume=str(tmp_path / "checkpoint-2"))
    assert len(rollouts.training) == len(whole.rollouts.training) // 2
    for name, expected in whole.parameters.items():
        assert torch.equal(resumed.parameters[name], expected), name
    assert len(resumed.logs) == len(whole.logs)
    for expected, got in zip(whole.logs[:-1], resumed.logs[:-1], strict=True):
        for name, value in expected.items():
            if not name.endswith((*TIMED, "_seconds")):
                assert got[name] == value, name


PROMPT, TURN, REPLY, OTHER = [5, 6, 7], [8, 9], [10, 11], [12]
REWARDS = [1.0, 5.0, 0.0, 3.0]


def forked(prompt, count):
    """Four episodes below one turn, of which the first passes through the second turn's history twice."""

    def sample(history, answer):
        return Sample(
            prompt_ids=history, completion_ids=answer, env_mask=[1] * len(answer), logprobs=[-3.0] * len(answer)
        )

    root, later = sample(PROMPT, TURN), PROMPT + TURN + REPLY
    samples = [
        [root, sample(later, [13, 14]), sample(later, [15])],
        [root, sample(later, [16])],
        [sample(PROMPT, OTHER)],
        [root],
    ]
    return [Episode(samples=one, reward=reward) for one, reward in zip(samples, REWARDS, strict=True)]


def test_credit_of_turns_is_over_episodes(tmp_path):
    """The value of a history is the mean reward of the episodes through it, however many of their rows it begins."""
    seen = []

    class Spy(TreeGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            seen.append(super()._generate_and_score_completions(inputs))
            return seen[-1]

    options = {"tree_credit": "turn", "scale_rewards": "none", "max_steps": 1, "gradient_accumulation_steps": 1}
    run_on_episodes(tmp_path, RaggedRollouts(source=forked), trainer_class=Spy, **options)
    after_root, of_all = (1 + 5 + 3) / 3, (1 + 5 + 0 + 3) / 4
    after_reply = (1 + 5) / 2
    expected = [
        [after_root - of_all] * 2,
        [1 - after_reply] * 2,
        [1 - after_reply],
        [after_root - of_all] * 2,
        [5 - after_reply],
        [0 - of_all],
        [after_root - of_all] * 2,
    ]
    got = seen[0]["advantages"]
    for row, values in enumerate(expected):
        assert got[row, : len(values)].tolist() == pytest.approx(values), row


@pytest.mark.parametrize("learning_rate", [1e-3, 1e-4])
def test_equal_rewards_near_the_reference_in_float32(learning_rate, tmp_path):
    """A step whose advantages are all 0 has a KL term only, of differences so small that rounding makes it up."""

    def change(output):
        if len(rollouts.training) > 1:
            output["recorded_reward"] = [1.0] * 8

    rollouts = RaggedRollouts(change=change)
    options = {"beta": 0.1, "tree_episode_weight": "episode", "learning_rate": learning_rate}
    trainer = build_trainer(tmp_path, rollouts, dtype=torch.float32, max_steps=3, **options)
    trainer.train()
    assert all(abs(log["loss"]) < 1e-6 for log in trainer.state.log_history[1:-1])


def test_calls_may_differ_between_steps(tmp_path):
    """A generation without the key has one row an episode; the next may have it."""
    calls = []

    def change(output):
        calls.append(len(calls))
        if len(calls) % 2:
            del output["episode"]

    run = run_on_episodes(tmp_path, RaggedRollouts(source=first_samples, change=change), loss_type="grpo")
    assert len(calls) == 2
    assert_follows(run, followed(run))


def test_calls_may_not_differ_within_a_step(tmp_path):
    """One optimizer step has one normaliser."""

    def change(output):
        if len(rollouts.training) == 2:
            del output["episode"]

    rollouts = RaggedRollouts(source=first_samples, change=change)
    with pytest.raises(ValueError, match="the key 'episode' from all calls of the rollout function within an optim"):
        run_on_episodes(tmp_path, rollouts, steps_per_generation=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out: out["episode"].pop(), r"\d+ rows, as many as 'episode' has entries, got \d+ in 'prompt_ids'"),
        (lambda out: out["env_mask"].pop(), r"\d+ rows, as many as 'episode' has entries, got \d+ in 'env_mask'"),
        (lambda out: out["episode"].reverse(), "in the order of the prompts, got episode"),
        (lambda out: out["episode"].__setitem__(-1, 8), r"in \[0, 8\), got 8"),
        (lambda out: out.update(note=["a"] * len(out["episode"])), r"'note' to have 8 entries, one per episode"),
        (lambda out: out.update(recorded_reward=[0.0] * 7), r"'recorded_reward' to have 8 entries.*got 7"),
        (lambda out: out.update(samples=[[]] * 8), "no samples beside 'episode'"),
        (lambda out: out["completion_ids"].__setitem__(9, [VOCAB]), rf"\[0, {VOCAB}\) in completion_ids\[9\]"),
        (lambda out: out.update(advantages=[[0.0]] * 8), r"rows, as many as 'episode'.*got 8 in 'advantages'"),
        (lambda out: out.pop("episode"), "8 rows for 8 prompts.*the key 'episode'"),
    ],
    ids=[
        "fewer-indices",
        "fewer-masks",
        "descending",
        "beyond",
        "extra-per-row",
        "extra-too-short",
        "samples",
        "vocabulary",
        "advantages-per-episode",
        "no-key",
    ],
)
def test_broken_episodes(change, message, tmp_path):
    """Named before anything is trained."""
    rollouts = RaggedRollouts(change=change)
    trainer = build_trainer(tmp_path, rollouts)
    with pytest.raises(ValueError, match=message):
        train(trainer, rollouts)
    assert trainer.state.global_step == 0


def test_unknown_weight(tmp_path):
    """The option has two values."""
    with pytest.raises(ValueError, match="tree_episode_weight to be one of sample, episode, got 'token'"):
        TreeGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, tree_episode_weight="token")


def test_rloo_refuses_rollouts(tmp_path):
    """TRL's RLOO trainer knows no rollout function."""
    with pytest.raises(UnsupportedModelError, match="rollout_func for TreeRLOOTrainer"):
        run_on_episodes(tmp_path, trainer_class=TreeRLOOTrainer, config_class=TreeRLOOConfig)
