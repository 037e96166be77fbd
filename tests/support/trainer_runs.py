"""Runs a stock and a tree trainer on the same recorded rollouts and compares what they leave."""

from pathlib import Path
from typing import Any

import torch

from support import recorded
from support.models import shallow_model
from support.oracle import float64_everywhere

# Metrics that measure time.
TIMED = ("step_time", "runtime", "samples_per_second", "steps_per_second", "total_flos")
# Parameters may differ by this part of what training moved them by, metrics by this part of themselves. TRL's fused
# head works in float32 even for float64 models: 6e-8 relative in each log-prob and gradient. The largest seen over
# all cases was 2.6e-6 of the movement.
RELATIVE_TOLERANCE = 1e-5
# Of stock trainers, by their options: what is compared with them differs in the tree's options alone.
_STOCK: dict[tuple, tuple] = {}


def run_trainer(
    trainer_class: type, config_class: type, folder: Path, *, family: str = "qwen3_5_text", **options: Any
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]], Any]:
    """Trains a fresh float64 model for two steps; returns its parameters, its log history and the trainer.

    The model is what ``make_model``, `shallow_model` if left out, makes of the family.
    A stock trainer runs once for equal options, unless these have a state (callbacks, adapters, data sets).
    """
    if not config_class.__module__.startswith("trl.") or {"callbacks", "peft_config", "dataset"} & options.keys():
        return _run(trainer_class, config_class, folder, family, options)
    # Functions themselves, so that none is taken for a later one at its address.
    values = tuple((name, one if callable(one) else repr(one)) for name, one in sorted(options.items()))
    key = (trainer_class, family, values)
    if key not in _STOCK:
        _STOCK[key] = _run(trainer_class, config_class, folder, family, options)
    return _STOCK[key]


def _run(trainer_class: type, config_class: type, folder: Path, family: str, options: dict[str, Any]) -> tuple:
    options = dict(options)
    rollout_func = options.pop("rollout_func", recorded.rollout_func)
    dataset = options.pop("dataset", None) or recorded.dataset()
    callbacks, lora = options.pop("callbacks", None), options.pop("peft_config", None)
    make_model = options.pop("make_model", shallow_model)
    if lora is not None:  # which TRL prepares for layers that are computed again
        options.setdefault("gradient_checkpointing", True)
    model = make_model(family, dtype=torch.float64, seed=1)
    if options.get("beta"):  # TRL loads the reference model from where the policy came from
        model.save_pretrained(folder / "start")
        model = type(model).from_pretrained(folder / "start", dtype=torch.float64, experts_implementation="eager")
        model.train()
    extra = {"rollout_func": rollout_func} if rollout_func is not None else {}
    if options.get("eval_strategy", "no") != "no":
        extra["eval_dataset"] = recorded.dataset().select(range(2))
    trainer = trainer_class(
        model,
        recorded.recorded_reward,
        args=config_class(**recorded.arguments(folder, **{"max_steps": 2, **options})),
        train_dataset=dataset,
        processing_class=recorded.tokenizer(),
        callbacks=callbacks,
        peft_config=lora,
        **extra,
    )
    with float64_everywhere(model):
        trainer.train()
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return parameters, trainer.state.log_history, trainer


def assert_same_training(
    stock: tuple, tree: tuple, *, family: str = "qwen3_5_text", make_model: Any = shallow_model
) -> None:
    """Parameters equal to float32 rounding of what training moved them by, and every TRL metric equal."""
    start = dict(make_model(family, dtype=torch.float64, seed=1).named_parameters())
    moved = max((stock[0][name] - start[name]).abs().max().item() for name in start)
    assert 1e-4 < moved < 1, f"the training moved parameters by {moved:.1e}: nothing to compare, or chaos"
    for name, value in stock[0].items():
        difference = (tree[0][name] - value).abs().max().item()
        assert difference < RELATIVE_TOLERANCE * moved, f"{name}: {difference:.2e}, training moved it by {moved:.1e}"
    assert len(stock[1]) == len(tree[1])
    for stock_log, tree_log in zip(stock[1], tree[1], strict=True):
        for name, value in stock_log.items():
            if not name.endswith(TIMED):
                allowed = RELATIVE_TOLERANCE * max(1.0, abs(value))
                assert abs(tree_log[name] - value) <= allowed, f"{name}: {tree_log[name]} against {value}"
