"""What of episodes reaches the reward functions, TRL's batches and its metrics."""

import math

import numpy as np
import pytest
import torch
from datasets import Dataset
from support import recorded
from support.episode_oracle import advantages_of, rewards_of, rows_of
from support.episode_runs import assert_same_parameters, build_trainer, followed, run_on_episodes, train
from support.episodes import EOS, Episode, RaggedRollouts, Sample, empty, episodes_of
from support.trainer_runs import TIMED

from harts_hf import TreeGRPOTrainer


class Spy(TreeGRPOTrainer):
    """Keeps the batch of every micro-step."""

    def __init__(self, *args, **kwargs):
        self.batches = []
        super().__init__(*args, **kwargs)

    def _prepare_inputs(self, generation_batch):
        self.batches.append(super()._prepare_inputs(generation_batch))
        return self.batches[-1]


def test_the_episodes_have_the_corners(tmp_path):
    """Nought to five samples, slices of unequal numbers of rows; some recur in whole or in part, some are cut."""
    run = run_on_episodes(tmp_path)
    episodes = [episode for generation in run.rollouts.training for episode in generation.episodes]
    assert {len(episode.samples) for episode in episodes} == {0, 1, 2, 3, 4, 5}
    assert len({len(one[0]) for window in followed(run).windows for one in window}) > 2
    pairs = [pair for one in episodes if one.samples for pair in zip(one.samples, rows_of(one), strict=True)]
    recurring = [(sum(sample.env_mask), int(row.count)) for sample, row in pairs]
    assert any(after == 0 for before, after in recurring) and any(0 < after < before for before, after in recurring)
    assert any(0 in sample.env_mask for sample, _ in pairs)
    assert {sample.completion_ids[-1] == EOS for sample, _ in pairs} == {True, False}


def rows_in(batch):
    """Prompt, completion, mask and advantage of each row of a batch, without padding."""
    mask = batch["completion_mask"] * batch.get("tool_mask", 1)
    for row in range(len(mask)):
        prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()
        real = batch["completion_mask"][row].bool()
        yield prompt, batch["completion_ids"][row][real].tolist(), mask[row][real].tolist(), batch["advantages"][row]


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [{}, {"steps_per_generation": 4, "per_device_train_batch_size": 2}])
def test_rows_of_an_episode_stay_together(options, tmp_path):
    """Each slice holds as many episodes, all rows of each in order, every sampled token with mask 1 once."""
    run = run_on_episodes(tmp_path, trainer_class=Spy, **options)
    loop = followed(run)
    expected = [one[0] for window in loop.windows for one in window]
    assert len(run.trainer.batches) == len(expected)
    assert len({len(rows) for rows in expected}) > 1
    for batch, rows in zip(run.trainer.batches, expected, strict=True):
        assert len(batch["prompt_ids"]) == len(rows)
        for (prompt, completion, mask, advantage), row in zip(rows_in(batch), rows, strict=True):
            if row.sampled.any():  # what stands for an episode without a sample is nobody's business
                assert (prompt, completion) == (row.prompt, row.completion)
                assert mask == row.mask.tolist()
            assert not any(mask) or row.count > 0
            assert advantage.item() == pytest.approx(row.advantage.item(), abs=1e-5)


def test_advantages_of_tokens(tmp_path):
    """The key `advantages` has one list a row; it goes with its row."""

    def change(output):
        rng = np.random.default_rng(0)
        output["advantages"] = [rng.normal(size=len(ids)).tolist() for ids in output["completion_ids"]]
        given.extend(zip(output["completion_ids"], output["advantages"], strict=True))

    given = []
    run = run_on_episodes(tmp_path, RaggedRollouts(change=change), trainer_class=Spy)
    seen = 0
    for batch in run.trainer.batches:
        for _, completion, _, advantage in rows_in(batch):
            of_row = [numbers for ids, numbers in given if ids == completion]
            if of_row:
                got = advantage[: len(completion)].tolist()
                assert any(got == pytest.approx(numbers, abs=1e-6) for numbers in of_row)
                seen += 1
            else:
                assert not advantage.any()
    assert seen == len(given)


@pytest.mark.parametrize("conversational", [False, True])
def test_reward_functions_see_episodes(conversational, tmp_path):
    """One entry an episode: its last sample as `completions`, all as `samples`; another function says None."""
    calls = []

    def reward(prompts, completions, completion_ids, samples, recorded_reward, note, **rest):
        calls.append((prompts, completions, completion_ids, samples, recorded_reward, note))
        return recorded_reward

    def none_of_some(completions, **rest):
        return [None if number % 2 else 1.0 for number in range(len(completions))]

    def change(output):
        output["note"] = "the same for all"

    rollouts = RaggedRollouts(change=change)
    words, dataset, play = recorded.tokenizer(), recorded.dataset(), rollouts
    if conversational:
        prompts = [[{"role": "user", "content": f"p{number}"}] for number in range(recorded.NUM_PROMPTS)]
        dataset = Dataset.from_dict({"prompt": prompts})

        def play(prompts, trainer):
            return rollouts([prompt[0]["content"] for prompt in prompts], trainer)

    trainer = build_trainer(tmp_path, play, reward=[reward, none_of_some], max_steps=1, dataset=dataset)
    train(trainer, rollouts)
    (prompts, completions, completion_ids, samples, rewards, notes), episodes = calls[0], rollouts.training[0].episodes
    assert {len(one) for one in calls[0]} == {len(episodes)} == {8}
    assert notes == ["the same for all"] * 8
    assert rewards == [episode.reward for episode in episodes]
    assert [prompt == prompts[0] for prompt in prompts] == [True] * 4 + [False] * 4

    def form(sample):
        text = words.decode(sample.completion_ids, skip_special_tokens=True)
        return [{"role": "assistant", "content": text}] if conversational else text

    for number, episode in enumerate(episodes):
        assert samples[number] == [form(sample) for sample in episode.samples]
        if episode.samples:
            assert completion_ids[number] == episode.samples[-1].completion_ids
            assert completions[number] == form(episode.samples[-1])


def test_group_statistics_are_over_episodes(tmp_path):
    """Rewards and advantages as logged: one an episode, those without a sample in no statistic, with advantage 0."""
    run = run_on_episodes(tmp_path, max_steps=1)
    episodes = run.rollouts.training[0].episodes
    rewards = rewards_of(episodes)
    assert rewards.isnan().sum() == 1
    advantages = advantages_of(rewards, 4, "group")
    assert list(run.trainer._logs["advantages"]) == pytest.approx(advantages.tolist(), abs=1e-5)
    real, log = rewards[~rewards.isnan()], run.logs[0]
    assert log["reward"] == pytest.approx(real.mean().item(), abs=1e-6)
    assert log["rewards/recorded_reward/mean"] == pytest.approx(real.mean().item(), abs=1e-6)
    assert log["reward_std"] == pytest.approx(real.std().item(), abs=1e-6)
    assert log["frac_reward_zero_std"] == 0


def without_empty(prompt, count):
    """Episodes with at least one sample each."""
    return [
        episode if episode.samples else Episode(samples=[end], reward=episode.reward)
        for episode in episodes_of(prompt, count)
        for end in [Sample(prompt_ids=[5], completion_ids=[7, EOS], env_mask=[1, 1], logprobs=[-3.0, -3.0])]
    ]


@pytest.mark.parametrize("source", [episodes_of, without_empty])
def test_lengths(source, tmp_path):
    """Trained tokens of episodes and of samples; what ended; how many samples; every token that was read."""
    run = run_on_episodes(tmp_path, RaggedRollouts(source=source), max_steps=1)
    episodes, log = run.rollouts.training[0].episodes, run.logs[0]
    rows = [rows_of(episode) for episode in episodes]
    by_sample = [
        int(row.count) for one, of_episode in zip(episodes, rows, strict=True) if one.samples for row in of_episode
    ]
    by_episode = np.array([sum(int(row.count) for row in of_episode) for of_episode in rows])
    for name, values in (("completions", by_episode), ("completions/sample", by_sample)):
        got = [log[f"{name}/{kind}_length"] for kind in ("mean", "min", "max")]
        assert got == pytest.approx([np.mean(values), np.min(values), np.max(values)])
    assert log["completions/samples_per_episode"] == pytest.approx(len(by_sample) / len(episodes))
    if source is without_empty:
        ended = np.array([episode.samples[-1].completion_ids[-1] == EOS for episode in episodes])
        assert 0 < ended.mean() < 1
        assert log["completions/clipped_ratio"] == pytest.approx(1 - ended.mean())
        for kind, value in (("mean", np.mean), ("min", np.min), ("max", np.max)):
            assert log[f"completions/{kind}_terminated_length"] == pytest.approx(value(by_episode[ended]))
        prompts = sum(len(sample.prompt_ids) for episode in episodes for sample in episode.samples)
        assert log["num_tokens"] == prompts + sum(by_sample)


@pytest.mark.exhaustive
@pytest.mark.parametrize("loss", ["bnpo", "dapo"])
def test_no_sample_at_all(loss, tmp_path):
    """A batch of episodes without samples takes a step of zero gradients, and the next batch trains."""

    def source(prompt, count):
        found = episodes_of(prompt, count)
        rollouts_so_far = len(rollouts.training)
        return found if rollouts_so_far else [Episode(samples=empty(None), reward=one.reward) for one in found]

    rollouts = RaggedRollouts(source=source)
    run = run_on_episodes(tmp_path, rollouts, loss_type=loss)
    assert run.logs[0]["grad_norm"] == 0 and run.logs[0]["loss"] == 0
    assert run.logs[0]["reward"] is None or math.isnan(run.logs[0]["reward"])
    assert run.logs[1]["grad_norm"] > 0
    assert_same_parameters(run.parameters, followed(run))


def one_sample_each(prompt, count):
    """The longest rows of the ragged episodes, one each."""
    return [
        Episode(samples=[max(one.samples, key=lambda sample: len(sample.completion_ids))], reward=one.reward)
        for one in without_empty(prompt, count)
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("loss", ["grpo", "bnpo", "dapo"])
def test_with_one_row_an_episode_the_key_changes_nothing(loss, tmp_path):
    """Bit for bit: parameters and metrics."""
    options = {"loss_type": loss, "num_iterations": 2, "epsilon": 0.02, "learning_rate": 0.3, "beta": 0.05}
    options |= {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8, "entropy_coef": 0.1}
    runs = [
        run_on_episodes(tmp_path / str(key), RaggedRollouts(source=one_sample_each, with_key=key), **options)
        for key in (False, True)
    ]
    for (name, plain), keyed in zip(runs[0].parameters.items(), runs[1].parameters.values(), strict=True):
        assert torch.equal(plain, keyed), name
    assert len(runs[0].logs) == len(runs[1].logs)
    for plain, keyed in zip(runs[0].logs, runs[1].logs, strict=True):
        extra = [name for name in keyed if "completions/sample" in name]
        assert keyed.keys() - plain.keys() == set(extra)
        for name, value in plain.items():
            if "_length" in name:  # means that TRL takes in float32
                assert keyed[name] == pytest.approx(value, rel=1e-6), name
            elif not name.endswith((*TIMED, "_seconds")):
                assert keyed[name] == value, name
