"""Trainers that users changed, on episodes: subclasses, replaced methods, callbacks, keys of their own in batches."""

from typing import ClassVar

import numpy as np
import pytest
import torch
from support.episode_runs import build_trainer
from support.episodes import Episode, RaggedRollouts, Sample
from transformers import TrainerCallback

from harts_hf import TreeGRPOTrainer

EOS = 1


def sample(prompt, answer, mask=None):
    """A row."""
    return Sample(
        prompt_ids=prompt, completion_ids=answer, env_mask=mask or [1] * len(answer), logprobs=[-3.0] * len(answer)
    )


def two_samples_each(prompt, count):
    """Episodes of two rows each, so that rows are a multiple of what groups hold."""
    return [
        Episode(
            samples=[sample([5, 6], [8 + number] * (2 + number) + [EOS]), sample([7], [8 + number, 12, EOS])],
            reward=float(number),
        )
        for number in range(count)
    ]


def alone(prompt, count):
    """A row per episode, rewards 0, 1, 2, ..."""
    return [Episode(samples=[sample([5, 6], [8 + number, EOS])], reward=float(number)) for number in range(count)]


class OwnRewards(TreeGRPOTrainer):
    """Rewards by the number of tokens, without TRL's."""

    seen: ClassVar[list] = []

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        self.seen.append((len(inputs), len(prompts), len(completions), len(completion_ids_list)))
        return torch.tensor([[float(len(ids))] for ids in completion_ids_list])


def test_a_subclass_rewards_episodes(tmp_path):
    """Each by its last sample, whatever calls TRL's method."""
    OwnRewards.seen.clear()
    trainer = build_trainer(tmp_path, RaggedRollouts(source=two_samples_each), trainer_class=OwnRewards, max_steps=1)
    trainer.train()
    assert set(OwnRewards.seen) == {(8, 8, 8, 8)}
    assert not np.any(trainer._logs["advantages"])  # the last samples are equally long


class Negated(TreeGRPOTrainer):
    """Minus TRL's rewards."""

    batches: ClassVar[list] = []

    def _calculate_rewards(self, *args, **kwargs):
        return -super()._calculate_rewards(*args, **kwargs)

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        self.batches.append(batch)
        return batch


@pytest.mark.parametrize("credit", ["trajectory", "turn", "branch"])
def test_credit_is_of_a_subclass_rewards(credit, tmp_path):
    """Not of those that TRL's method returned to it."""
    Negated.batches.clear()
    options = {"max_steps": 1, "tree_credit": credit, "scale_rewards": "none"}
    build_trainer(tmp_path, RaggedRollouts(source=alone), trainer_class=Negated, **options).train()
    advantages = Negated.batches[0]["advantages"]
    first = advantages[:4] if advantages.ndim == 1 else advantages[:4, 0]
    expected = torch.tensor([1.5, 0.5, -0.5, -1.5]) * (4 / 3 if credit == "branch" else 1)
    torch.testing.assert_close(first.float(), expected)


def test_truncated_rows_count_in_the_values_of_histories(tmp_path):
    """Two rows below one turn, rewards 1 and 0, of which one was cut: the turn changed nothing."""

    def source(prompt, count):
        rows = [[8, 40, 9, EOS], [8, 40, 10, 11], [12, 40, 9, EOS], [13, 40, 9, EOS]]
        rewards = [1.0, 0.0, 0.5, 0.5]
        samples = [sample([5, 6], row, [1, 0, 1, 1]) for row in rows]
        return [Episode(samples=[one], reward=reward) for one, reward in zip(samples, rewards, strict=True)]

    class Recording(TreeGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            found.append(batch["advantages"])
            return batch

    found: list[torch.Tensor] = []
    options = {"mask_truncated_completions": True, "tree_credit": "turn", "scale_rewards": "none", "max_steps": 1}
    build_trainer(tmp_path, RaggedRollouts(source=source), trainer_class=Recording, **options).train()
    torch.testing.assert_close(found[0][:4, 0].float(), torch.zeros(4))
    torch.testing.assert_close(found[0][0].float(), torch.tensor([0.0, 0.0, 0.5, 0.5]))


def test_weights_are_those_of_the_rollouts(tmp_path):
    """An option that a callback changes between two uses of a batch does not mix two ways of weighing."""

    class Change(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            args.tree_episode_weight = "sample"

    losses = []
    for callbacks in ([], [Change()]):
        options = {"tree_episode_weight": "episode", "num_iterations": 2, "learning_rate": 1e-12, "logging_steps": 1}
        trainer = build_trainer(tmp_path / str(len(losses)), RaggedRollouts(), **options)
        for callback in callbacks:
            trainer.add_callback(callback)
        trainer.train()
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    assert losses[0] == losses[1]


def test_a_method_that_was_replaced_stays_so(tmp_path):
    """The trainer's own wrapping gives back what it found."""
    trainer = build_trainer(tmp_path, RaggedRollouts())
    calls = []
    score = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: calls.append(1) or score(inputs)
    trainer.train()
    assert len(calls) == 2


class AddedTerm(TreeGRPOTrainer):
    """A term beside TRL's loss."""

    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) * 2


class RowKeys(TreeGRPOTrainer):
    """Keys of its own in the batch."""

    number_of_entries = None

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        rows = len(batch["completion_ids"])
        self.of_rows = getattr(self, "of_rows", [])
        batch["mine"] = list(range(rows))[: self.number_of_entries]
        batch["tokens"] = batch["completion_ids"].sum(dim=1)
        return batch

    def _compute_loss(self, model, inputs):
        sums = inputs["completion_ids"].sum(dim=1)
        assert torch.equal(inputs["tokens"], sums) and len(inputs["mine"]) == len(sums)
        return super()._compute_loss(model, inputs)


def test_a_loss_beside_the_scaled_one_is_refused(tmp_path):
    """Its terms would be neither scaled nor weighted."""
    trainer = build_trainer(tmp_path, RaggedRollouts(), trainer_class=AddedTerm)
    with pytest.raises(ValueError, match="override _compute_loss instead"):
        trainer.train()


def test_a_batch_may_have_more_keys_of_rows(tmp_path):
    """They go with the rows when episodes are shuffled and split; of another length they are refused."""
    build_trainer(tmp_path, RaggedRollouts(), trainer_class=RowKeys).train()

    class TooFew(RowKeys):
        number_of_entries = 8

    with pytest.raises(ValueError, match=r"'mine' of the batch to have \d+ entries, one per row, got 8"):
        build_trainer(tmp_path, RaggedRollouts(), trainer_class=TooFew).train()


def test_a_rollout_function_that_is_set_later(tmp_path):
    """It is checked as one that the constructor was given."""
    trainer = build_trainer(tmp_path, RaggedRollouts(), max_steps=1)
    rollouts = RaggedRollouts()
    trainer.rollout_func = rollouts
    trainer.train()
    assert len(rollouts.training) == 1
