"""Settings that callbacks change between the micro-steps of an optimizer step reach their own slice, as in TRL."""

import numpy as np
import pytest
import torch
from support.trainer_runs import assert_same_training, run_trainer
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from harts_hf import TreeGRPOConfig, TreeGRPOTrainer
from harts_hf.trainers.settings import SettingsOfSlices, read_settings

CUT = {"tree_sharing": "always", "tree_max_tokens_per_microbatch": 64}


class Changes(TrainerCallback):
    """Calls ``change(trainer, step)`` after each micro-step but the last, and after each optimizer step."""

    def __init__(self, change):
        self.change, self.trainer = change, None

    def on_substep_end(self, args, state, control, **kwargs):
        self.change(self.trainer, state.global_step + 1)

    on_step_end = on_substep_end


def trained(base, config, folder, change, **options):
    """A run whose callback knows its trainer."""
    callback = Changes(change)

    class Known(base):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            callback.trainer = self

    return run_trainer(Known, config, folder, callbacks=[callback], **options)


def adapted_entropy_bonus(trainer, step):
    if not trainer.accelerator.sync_gradients:  # TRL's loss adapts it at the end of the step
        trainer.entropy_coef = 0.1


def entropy_bonus_of_numpy(trainer, step):
    trainer.entropy_coef = np.float64(0.1 * step) if step % 2 else torch.tensor(0.1 * step)


def grown(trainer, step):
    """Other numbers within a step than between two: a first step's ratios and divergences say nothing."""
    return step if trainer.accelerator.sync_gradients else 2 * step


def clipping(trainer, step):
    trainer.epsilon_high = 0.001 * grown(trainer, step)
    trainer.args.epsilon_high = 0.001 * grown(trainer, step)
    trainer.epsilon_low = 0.002 * grown(trainer, step)


def kl(trainer, step):
    trainer.beta = 0.2 * grown(trainer, step)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("change", "options"),
    [
        (entropy_bonus_of_numpy, {"entropy_coef": 0.05}),
        (clipping, {"num_iterations": 2, "learning_rate": 0.3}),
        (kl, {"beta": 0.05}),
        (
            adapted_entropy_bonus,
            {
                "use_adaptive_entropy": True,
                "entropy_target": 4.5,
                "entropy_coef_delta": 0.03,
                "entropy_coef_max": 0.9,
                "entropy_coef": 0.05,
            },
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_settings_of_each_slice(change, options, tmp_path):
    """Parameters and metrics are stock TRL's though a loss's settings change at every micro-step."""
    stock = trained(GRPOTrainer, GRPOConfig, tmp_path / "stock", change, **options)
    tree = trained(TreeGRPOTrainer, TreeGRPOConfig, tmp_path / "tree", change, **options, **CUT)
    assert_same_training(stock, tree)
    constant = run_trainer(GRPOTrainer, GRPOConfig, tmp_path / "constant", **options)
    with pytest.raises(AssertionError):
        assert_same_training(constant, tree)  # the change matters


def test_what_forwards_read_cannot_change_within_a_step(tmp_path):
    """One forward serves all micro-steps of a step, so it has one temperature."""

    def change(trainer, step):
        trainer.temperature = 1.0 + 0.1 * step

    with pytest.raises(ValueError, match=r"the same temperature throughout an optimizer step, got \[0\.9, 1\.1\]"):
        trained(TreeGRPOTrainer, TreeGRPOConfig, tmp_path, change, gradient_accumulation_steps=2, **CUT)


@pytest.mark.exhaustive
def test_temperature_that_changes_between_steps(tmp_path):
    """TRL's head keeps the temperature of the start; so do trees."""

    def change(trainer, step):
        if trainer.accelerator.sync_gradients:
            trainer.temperature = 1.0 + 0.1 * step

    stock = trained(GRPOTrainer, GRPOConfig, tmp_path / "stock", change)
    assert_same_training(stock, trained(TreeGRPOTrainer, TreeGRPOConfig, tmp_path / "tree", change, **CUT))


def test_what_a_loss_counts_goes_on():
    """Only what changed between micro-steps is put back: counters of the loss itself are not settings."""
    trainer = type("Trainer", (), {})()
    trainer.args = type("Arguments", (), {})()
    trainer.beta, trainer.calls, trainer.weights, trainer.range = 0.1, 0, [1], (0.8, 1.2)
    taken = [read_settings(trainer)]
    trainer.beta, trainer.label, trainer.range, trainer.weights = 0.2, "late", (0.7, 1.2), [2]
    taken.append(read_settings(trainer))
    settings = SettingsOfSlices(trainer, taken)
    seen = []
    for _ in range(2):  # a loss may be computed several times
        for number in range(2):
            settings.apply(number)
            seen.append((trainer.beta, trainer.calls))
            assert trainer.range == ((0.8, 1.2), (0.7, 1.2))[number]
            trainer.calls += 1
    settings.apply(0)
    settings.restore()
    assert seen == [(0.1, 0), (0.2, 1), (0.1, 2), (0.2, 3)]
    assert (trainer.beta, trainer.calls, trainer.label, trainer.weights) == (0.2, 4, "late", [2])
