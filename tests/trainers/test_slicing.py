"""How a step is split into micro-steps: what of TRL's losses depends on it, and who is told that it costs time."""

import logging
from types import SimpleNamespace

import pytest
import torch
from support import recorded
from support.models import tiny_model

from harts_hf import TreeGRPOConfig, TreeGRPOTrainer
from harts_hf.trainers import slicing
from harts_hf.trainers.slicing import SlicingHint, depends_on_slices, fewer
from harts_hf.trainers.weighing import UNITS

ROWS, COLUMNS = 8, 9


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """One whose loss is asked directly."""
    return TreeGRPOTrainer(
        tiny_model("qwen3_5_text"),
        recorded.recorded_reward,
        args=TreeGRPOConfig(**recorded.arguments(tmp_path_factory.mktemp("run"))),
        train_dataset=recorded.dataset(),
        processing_class=recorded.tokenizer(),
        rollout_func=recorded.rollout_func,
    )


def gradient(trainer, monkeypatch, rows_per_slice):
    """``[2, ROWS, COLUMNS]`` of the losses of all slices by log-probs and entropies, ragged rows."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.tensor([9, 1, 4, 7, 2, 9, 5, 3])
    mask = (torch.arange(COLUMNS) < lengths[:, None]).long()
    log_probs, old, reference = (-3 * torch.rand(ROWS, COLUMNS, generator=draw).double() for _ in range(3))
    batch = {
        "prompt_ids": torch.ones(ROWS, 1).long(), "prompt_mask": torch.ones(ROWS, 1).long(),
        "completion_ids": torch.ones(ROWS, COLUMNS).long(), "completion_mask": mask,
        "advantages": torch.randn(ROWS, generator=draw).double(), "old_per_token_logps": log_probs + 0.1 * old,
        "ref_per_token_logps": reference,
    }  # fmt: skip
    entropies = torch.rand(ROWS, COLUMNS, generator=draw).double()
    leaves = [values.clone().requires_grad_() for values in (log_probs, entropies)]
    slices = ROWS // rows_per_slice
    monkeypatch.setattr(trainer, "current_gradient_accumulation_steps", slices, raising=False)
    monkeypatch.setattr(trainer.args, "steps_per_generation", slices)
    total = torch.zeros(())
    for start in range(0, ROWS, rows_per_slice):
        own = slice(start, start + rows_per_slice)
        answer = (*(leaf[own] for leaf in leaves), None)
        monkeypatch.setattr(trainer, "_get_per_token_logps_and_entropies", lambda *_, answer=answer, **__: answer)
        one = {name: value[own] for name, value in batch.items()} | {"num_items_in_batch": mask.sum()}
        total = total + trainer._compute_loss(trainer.model, one)
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    return torch.stack(
        [torch.zeros_like(leaf) if one is None else one for leaf, one in zip(leaves, found, strict=True)]
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"importance_sampling_level": "sequence"},
        {"beta": 0.1},
        {"off_policy_mask_threshold": 0.1},
        {"entropy_coef": 0.1, "_entropy_bonus_enabled": True},
        {"top_entropy_quantile": 0.5},
    ],
    ids=lambda options: next(iter(options), "plain"),
)
@pytest.mark.parametrize("loss_type", sorted(UNITS))
def test_what_depends_on_slices(loss_type, options, trainer, monkeypatch):
    """TRL's gradient of one slice is that of eight, in float64 to roundings, unless it is said to depend on them."""
    monkeypatch.setattr(trainer, "loss_type", loss_type)
    for name, value in options.items():
        monkeypatch.setattr(trainer, name, value)
        if hasattr(trainer.args, name):
            monkeypatch.setattr(trainer.args, name, value)
    together, apart = (gradient(trainer, monkeypatch, rows) for rows in (ROWS, 1))
    difference = float((together - apart).norm() / together.norm())
    reason = depends_on_slices(trainer)
    assert reason == (next((n for n in options if n in ("entropy_coef", "top_entropy_quantile")), None)
                      if loss_type != "bnpo" else "loss_type='bnpo'")  # fmt: skip
    # Seen: 0 (eighths are exact), and from 0.027 on.
    assert difference > 0.01 if reason else difference < 1e-6


def test_arguments_alone_do_not_say_whether_routers_have_a_loss(tmp_path):
    """What the model's configuration decides counts as one."""
    options = recorded.arguments(tmp_path)
    assert depends_on_slices(TreeGRPOConfig(**options, router_aux_loss_coef=0.0)) is None
    for value in (None, 0.1):
        assert depends_on_slices(TreeGRPOConfig(**options, router_aux_loss_coef=value)) == "router_aux_loss_coef"


def test_many_small_slices_are_hinted_at_once(trainer, monkeypatch, caplog):
    """With the numbers to set; not of few, of large ones, or where rows are weighed by their company."""
    small = [{"completion_mask": torch.ones(2, 100)}] * 24
    large = [{"completion_mask": torch.ones(2, slicing.SMALL)}] * 24
    for loss_type, batches, told in (
        ("dapo", small[:23], False), ("dapo", large, False), ("bnpo", small, False), ("dapo", small, True)
    ):  # fmt: skip
        caplog.clear()
        monkeypatch.setattr(trainer, "loss_type", loss_type)
        hint = SlicingHint(trainer)
        with caplog.at_level(logging.WARNING):
            hint.note(batches)
            hint.note(batches)
        assert len(caplog.records) == told
    assert "per_device_train_batch_size=48 and gradient_accumulation_steps=1" in caplog.text
    caplog.clear()
    SlicingHint(SimpleNamespace(is_world_process_zero=lambda: True)).note(small)  # no loss of TRL's GRPO
    assert not caplog.records


def test_no_batch_is_larger_than_is_quick():
    """Divisors of what there is, so that every batch is full."""
    assert fewer(292, 100, 1) == (292, 1)
    assert fewer(24, 2**18, 3) == (12, 6) and fewer(7, 2**20, 2) == (2, 7) and fewer(5, 2**21, 1) == (1, 5)
