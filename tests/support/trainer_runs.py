"""Runs a stock and a tree trainer on the same recorded rollouts and compares what they leave."""

from pathlib import Path
from typing import Any

import torch

from support import recorded
from support.models import tiny_model
from support.oracle import float64_everywhere

# Metrics that measure time or depend on it.
TIMED = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos", "grad_norm")


def run_trainer(
    trainer_class: type, config_class: type, folder: Path, *, family: str = "qwen3_5_text", **options: Any
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]], Any]:
    """Trains a fresh float64 model; returns its parameters, its log history and the trainer."""
    rollout_func = options.pop("rollout_func", recorded.rollout_func)
    model = tiny_model(family, dtype=torch.float64, seed=1)
    extra = {"rollout_func": rollout_func} if rollout_func is not None else {}
    trainer = trainer_class(
        model,
        recorded.recorded_reward,
        args=config_class(**recorded.arguments(folder, **options)),
        train_dataset=recorded.dataset(),
        processing_class=recorded.tokenizer(),
        **extra,
    )
    with float64_everywhere(model):
        trainer.train()
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return parameters, trainer.state.log_history, trainer


def assert_same_training(
    stock: tuple, tree: tuple, *, family: str, parameter_tolerance: float, metric_tolerance: float
):
    """Parameters equal to rounding, moved by far more than that, and every TRL metric equal."""
    start = dict(tiny_model(family, dtype=torch.float64, seed=1).named_parameters())
    moved = max((stock[0][name] - start[name]).abs().max().item() for name in start)
    assert moved > 1e3 * parameter_tolerance, f"the training moved parameters by {moved:.1e} only"
    for name, value in stock[0].items():
        difference = (tree[0][name] - value).abs().max().item()
        assert difference < parameter_tolerance, f"{name}: {difference:.2e} (training moved parameters by {moved:.1e})"
    assert len(stock[1]) == len(tree[1])
    for stock_log, tree_log in zip(stock[1], tree[1], strict=True):
        for name, value in stock_log.items():
            if name in TIMED:
                continue
            allowed = metric_tolerance * max(1.0, abs(value))
            assert abs(tree_log[name] - value) <= allowed, f"{name}: {tree_log[name]} against {value}"
