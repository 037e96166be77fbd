"""Checkpoints that are not whole, or that a training would go on from differently, are refused before they load."""

import json
from dataclasses import replace

import pytest
import torch
from support import recorded
from support.models import tiny_model

from harts_hf import TreeGRPOConfig, TreeGRPOTrainer
from harts_hf.errors import HartsWarning
from harts_hf.trainers.checkpoints import MARKER, Facts, begin, check_resumable, finish, newest_whole

FACTS = Facts(
    backend="DDP or one process",
    world_size=2,
    batch_size=4,
    gradient_accumulation_steps=2,
    steps_per_generation=4,
    num_iterations=2,
    num_generations=4,
)


def checkpoint(folder, step=2, facts=FACTS, **more):
    """A whole checkpoint after some optimizer steps, of two files."""
    path = folder / f"checkpoint-{step}"
    begin(path)
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    (path / "below").mkdir()
    (path / "below" / "weights").write_bytes(bytes(100))
    how = {"micro_steps": step * facts.gradient_accumulation_steps, "with_optimizer": True, **more}
    finish(path, facts, **how)
    return path


def refused(path, now, message, **how):
    """Asserts an error before anything is loaded."""
    with pytest.raises(ValueError, match=message):
        check_resumable(path, now, **{"keeps_data_order": True, **how})


def test_a_whole_checkpoint(tmp_path):
    """In the middle of a generation batch and at its end."""
    for step in (2, 4):
        check_resumable(checkpoint(tmp_path, step), FACTS, keeps_data_order=True)
    refused(tmp_path / "checkpoint-9", FACTS, "expected a checkpoint's folder")


@pytest.mark.parametrize(
    ("harm", "missing"),
    [
        (lambda path: begin(path), "half-written"),
        (lambda path: (path / MARKER).write_bytes(b""), f"{MARKER} is broken"),
        (lambda path: (path / "below" / "weights").unlink(), "below/weights is missing"),
        (lambda path: (path / "below" / "weights").write_bytes(b"cut"), "weights has 3 bytes instead of 100"),
    ],
    ids=["killed", "empty", "missing", "cut"],
)
def test_checkpoints_that_are_not_whole(harm, missing, tmp_path):
    """Refused by what is missing, naming the one before; the newest whole one is found."""
    whole, harmed = checkpoint(tmp_path, 2), checkpoint(tmp_path, 10)
    harm(harmed)
    refused(harmed, FACTS, f"{missing}.*newest whole one beside it is .*checkpoint-2'")
    found, broken = newest_whole(tmp_path)
    assert found == whole and list(broken) == ["checkpoint-10"] and missing in broken["checkpoint-10"]
    (whole / MARKER).unlink()
    (whole / "trainer_state.json").write_text('{"global_')  # of another trainer, which was killed
    assert newest_whole(tmp_path)[0] is None
    refused(harmed, FACTS, f"{missing}[^;]*$")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"world_size": 1}, "expected world_size=2.*got 1.*4 micro-steps into a generation batch of 8"),
        ({"steps_per_generation": 8}, "expected steps_per_generation=4"),
        ({"batch_size": 8}, "expected batch_size=4"),
        ({"num_iterations": 1}, "expected num_iterations=2"),
    ],
)
def test_within_a_generation_batch(changed, message, tmp_path):
    """Its rollouts belong to processes and settings."""
    refused(checkpoint(tmp_path, 2), replace(FACTS, **changed), message)
    refused(checkpoint(tmp_path, 6), replace(FACTS, **changed), message, keeps_data_order=False)


def test_another_number_of_processes(tmp_path):
    """At the end of a generation batch: with as many prompts per step, or the data begun anew; not under ZeRO."""
    path = checkpoint(tmp_path, 4)
    both = {"world_size": 1, "gradient_accumulation_steps": 4, "steps_per_generation": 8}
    check_resumable(path, replace(FACTS, **both), keeps_data_order=True)
    refused(path, replace(FACTS, world_size=1), "expected 2 prompts per optimizer step.*got 1.*ignore_data_skip")
    check_resumable(path, replace(FACTS, world_size=1), keeps_data_order=False)
    zero = replace(FACTS, backend="ZeRO-3")
    path = checkpoint(tmp_path, 8, facts=zero)
    refused(path, replace(zero, **both), "expected 2 processes.*got 1: DeepSpeed.*load_universal")
    check_resumable(path, replace(zero, **both), keeps_data_order=True, universal=True)


def test_other_checkpoints(tmp_path):
    """Of another backend, without an optimizer, without rollouts, and of a stock trainer."""
    refused(
        checkpoint(tmp_path, 4), replace(FACTS, backend="ZeRO-2"), "expected a checkpoint of ZeRO-2, got one of DDP"
    )
    refused(checkpoint(tmp_path, 6, with_optimizer=False), FACTS, "saved with save_only_model=True")
    refused(checkpoint(tmp_path, 2, without_rollouts="a table"), FACTS, "4 micro-steps into one: a table")
    check_resumable(checkpoint(tmp_path, 8, without_rollouts="a table"), FACTS, keeps_data_order=True)
    for step in (11, 12):
        (checkpoint(tmp_path, step) / MARKER).unlink()
    check_resumable(tmp_path / "checkpoint-12", FACTS, keeps_data_order=True)
    refused(tmp_path / "checkpoint-11", FACTS, "end of a generation batch.*6 micro-steps into one, without")


class Odd(TreeGRPOTrainer):
    """Keeps something in its batches that no checkpoint should hold."""

    def _generate_and_score_completions(self, inputs):
        return {**super()._generate_and_score_completions(inputs), "odd": [object()] * len(inputs)}

    def compute_loss(self, model, inputs, *args, **kwargs):
        return super().compute_loss(model, {k: v for k, v in inputs.items() if k != "odd"}, *args, **kwargs)


def build(folder, trainer_class=TreeGRPOTrainer, **options):
    """A trainer of which a generation batch lasts two steps."""
    options = {"save_strategy": "steps", "save_steps": 1, "steps_per_generation": 4, "max_steps": 3, **options}
    return trainer_class(
        tiny_model("qwen3_5_text", seed=1),
        recorded.recorded_reward,
        args=TreeGRPOConfig(**recorded.arguments(folder, **options)),
        train_dataset=recorded.dataset(),
        processing_class=recorded.tokenizer(),
        rollout_func=recorded.rollout_func,
    )


class KilledError(Exception):
    """Stands for a kill."""


@pytest.mark.exhaustive
def test_older_checkpoints_stay_until_the_new_one_is_whole(tmp_path):
    """With save_total_limit=1 a kill at the very end of a save leaves the one before, and that is resumed."""
    trainer = build(tmp_path, save_total_limit=1)
    save_rng_state = trainer._save_rng_state

    def save_and_die(folder):
        save_rng_state(folder)
        if folder.endswith("checkpoint-2"):
            raise KilledError

    trainer._save_rng_state = save_and_die
    with pytest.raises(KilledError):
        trainer.train()
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-2"}
    again = build(tmp_path, save_total_limit=1)
    with pytest.warns(HartsWarning, match="checkpoint-1, the newest whole.*over checkpoint-2: it is half-written"):
        again.train(resume_from_checkpoint=True)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]
    whole = build(tmp_path / "whole")
    whole.train()
    for expected, got in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.exhaustive
def test_rollouts_that_cannot_be_saved(tmp_path):
    """A checkpoint within their generation batch warns, and is refused; one at its end is fine."""
    with pytest.warns(HartsWarning, match="cannot be resumed: rollouts.*'odd'.* holds a object"):
        build(tmp_path, Odd).train()
    with pytest.raises(ValueError, match="2 micro-steps into one: rollouts"):
        build(tmp_path, Odd).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    with pytest.warns(HartsWarning, match="cannot be resumed"):  # of its third step again
        build(tmp_path, Odd).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_nothing_to_resume(tmp_path):
    """An empty folder, in which Trainer's own message speaks of a valid checkpoint."""
    with pytest.raises(ValueError, match=r"expected a whole checkpoint in .* to resume from, got none"):
        build(tmp_path).train(resume_from_checkpoint=True)
