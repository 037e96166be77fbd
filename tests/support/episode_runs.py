"""Trains on episodes with a trainer and with the plain loop, and compares what both leave."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from trl.experimental.gmpo import GMPOTrainer

from harts_hf import TreeGRPOConfig, TreeGRPOTrainer
from support import recorded
from support.episode_oracle import EpisodeLoop
from support.episodes import Generation, RaggedRollouts
from support.models import shallow_model
from support.oracle import float64_everywhere

FAMILY = "qwen3_5_text"
# Parts of what training moved parameters by, and of each metric. TRL's fused head computes log-probs in float32 for
# float64 models too, 6e-8 relative, the loop by float64 logits. The largest that was seen over all losses was 7e-8 of
# the movement and 1.3e-7 of a metric.
TOLERANCE = 1e-6


class Run(NamedTuple):
    """What a training left: parameters, log history, the trainer, and what was drawn."""

    parameters: dict[str, torch.Tensor]
    logs: list[dict[str, Any]]
    trainer: Any
    rollouts: RaggedRollouts


def build_trainer(
    folder: Path,
    rollouts: RaggedRollouts,
    *,
    reward: Any = recorded.recorded_reward,
    trainer_class: type = TreeGRPOTrainer,
    config_class: type = TreeGRPOConfig,
    dataset: Dataset | None = None,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Any:
    """A trainer of a fresh model, for two steps of eight episodes unless ``options`` say otherwise."""
    options = {"max_steps": 2, **options}
    if "harts" in trainer_class._tag_names:
        options = {"tree_sharing": "always", **options}
    model = shallow_model(FAMILY, dtype=dtype, seed=1)
    if options.get("beta"):  # TRL loads the reference model from where the policy came from
        model.save_pretrained(folder / "start")
        model = type(model).from_pretrained(folder / "start", dtype=dtype)
        model.train()
    has_evaluation = options.get("eval_strategy", "no") != "no"
    return trainer_class(
        model,
        reward,
        args=config_class(**recorded.arguments(folder, **options)),
        train_dataset=dataset or recorded.dataset(),
        eval_dataset=recorded.dataset().select(range(2)) if has_evaluation else None,
        processing_class=recorded.tokenizer(),
        rollout_func=rollouts,
    )


def train(trainer: Any, rollouts: RaggedRollouts, *, resume: str | None = None) -> Run:
    """Trains, noting how generations are shuffled."""
    with rollouts.watched(), float64_everywhere(trainer.model):
        trainer.train(resume_from_checkpoint=resume)
    parameters = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    return Run(parameters, trainer.state.log_history, trainer, rollouts)


def run_on_episodes(folder: Path, rollouts: RaggedRollouts | None = None, **options: Any) -> Run:
    """Both, with the options of :func:`build_trainer`."""
    rollouts = rollouts or RaggedRollouts()
    return train(build_trainer(folder, rollouts, **options), rollouts)


def follow(
    args: Any,
    generations: Sequence[list[Generation]],
    evaluations: Sequence[list[Generation]] = (),
    *,
    gmpo: bool = False,
    accumulation: list[int] | None = None,
    off_policy: bool = False,
) -> EpisodeLoop:
    """The loop over samples from the same start; the lists inside are over ranks."""
    model, reference = (shallow_model(FAMILY, dtype=torch.float64, seed=1) for _ in range(2))
    loop = EpisodeLoop(model, args, reference=reference, gmpo=gmpo, off_policy=off_policy)
    with float64_everywhere(model):
        loop.train(generations, evaluations, accumulation)
    return loop


def followed(run: Run, accumulation: list[int] | None = None, *, off_policy: bool = False) -> EpisodeLoop:
    """The loop on what a training of one process had drawn."""
    training, evaluation = ([[one] for one in drawn] for drawn in (run.rollouts.training, run.rollouts.evaluation))
    gmpo = isinstance(run.trainer, GMPOTrainer)
    return follow(run.trainer.args, training, evaluation, gmpo=gmpo, accumulation=accumulation, off_policy=off_policy)


def assert_follows(run: Run, loop: EpisodeLoop, *, tolerance: float = TOLERANCE) -> None:
    """Parameters are the loop's within a part of what training moved them by; losses and their metrics too."""
    assert_same_parameters(run.parameters, loop, tolerance=tolerance)
    assert_same_logs(run.logs, loop, tolerance=tolerance)


def assert_same_parameters(
    parameters: dict[str, torch.Tensor], loop: EpisodeLoop, *, tolerance: float = TOLERANCE
) -> None:
    """See :func:`assert_follows`."""
    start = dict(shallow_model(FAMILY, dtype=torch.float64, seed=1).named_parameters())
    expected = {name: parameter.detach() for name, parameter in loop.model.named_parameters()}
    assert parameters.keys() == expected.keys()
    moved = max((expected[name] - start[name]).abs().max().item() for name in start)
    assert 1e-4 < moved < 1, f"the training moved parameters by {moved:.1e}: nothing to compare, or chaos"
    worst = max((parameters[name] - expected[name]).abs().max().item() for name in start)
    assert worst < tolerance * moved, f"{worst:.2e} apart, training moved parameters by {moved:.1e}"


def assert_same_logs(logs: list[dict[str, Any]], loop: EpisodeLoop, *, tolerance: float = TOLERANCE) -> None:
    """See :func:`assert_follows`."""
    steps = [log for log in logs if "loss" in log]
    assert len(steps) == len(loop.logs)
    for number, (log, expected) in enumerate(zip(steps, loop.logs, strict=True)):
        for name, value in expected.items():
            allowed = tolerance * max(1.0, abs(value))
            assert abs(log[name] - value) <= allowed, f"step {number}, {name}: {log[name]}, expected {value}"
    evaluations = [log["eval_loss"] for log in logs if "eval_loss" in log]
    assert len(evaluations) == len(loop.evaluations)
    for got, value in zip(evaluations, loop.evaluations, strict=True):
        assert abs(got - value) <= tolerance * max(1.0, abs(value)), f"eval_loss: {got}, expected {value}"
