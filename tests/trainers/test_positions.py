"""Rows beyond `max_position_embeddings` are trained, and told once, with the longest row and the limit."""

import pytest
import torch
from support import recorded
from support.trainer_runs import run_trainer
from transformers import TrainerCallback

from harts_hf import TreeGRPOConfig, TreeGRPOTrainer
from harts_hf.errors import HartsWarning
from harts_hf.trainers.positions import PositionsHint


class Shorter(TrainerCallback):
    """Makes the model one for fewer positions than the rows have."""

    def on_train_begin(self, args, state, control, *, model, **kwargs):
        model.config.max_position_embeddings = 8


def test_long_rows_are_told_once(tmp_path):
    """In a training of two steps; of labelled rows by their mask, whatever their columns; not of rows that fit."""
    with pytest.warns(HartsWarning) as told:
        trainer = run_trainer(TreeGRPOTrainer, TreeGRPOConfig, tmp_path, callbacks=[Shorter()])[2]
    (message,) = [str(one.message) for one in told if one.category is HartsWarning]
    longest = int(message.split()[4])
    rows = recorded.rollout_func(recorded.dataset()["prompt"], trainer)
    lengths = [len(p) + len(c) for p, c in zip(rows["prompt_ids"], rows["completion_ids"], strict=True)]
    assert longest in lengths and "max_position_embeddings, 8:" in message

    mask = torch.ones(2, 12)
    mask[:, 8:] = 0
    labelled = {"input_ids": mask.long(), "attention_mask": mask}
    hint = PositionsHint(trainer)
    hint.note([labelled])  # padding is no token
    mask[1, 8] = 1
    with pytest.warns(HartsWarning, match="a trained row of 9 tokens"):
        hint.note([labelled])
    hint.note([labelled])
