"""A recipe as what `harts bench` measures: its model and arguments, on rollouts of one step that it collects."""

import argparse
import gc
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, set_seed
from trl import get_peft_config

from harts_hf.bench.sides import common_arguments
from harts_hf.bench.subject import Subject
from harts_hf.cli.policy import find_policy
from harts_hf.cli.recipe import parse
from harts_hf.cli.train import build_trainer
from harts_hf.cli.train_checks import check_processes
from harts_hf.cli.train_report import TrainReport
from harts_hf.rollouts.recorded import Rollout, RolloutGroup
from harts_hf.trainers.tree_options import check_optimizer


def subject_of_recipe(options: argparse.Namespace, fields: Sequence[str], device: torch.device) -> Subject:
    """Trains one step of the recipe, with its learning rate at 0, and takes its rollouts.

    Args:
        options: of the command.
        fields: of the recipe, from the command line.
        device: the recipe says where it trains; a GPU that it does not use is an error.

    Raises:
        ValueError: a recipe that cannot be trained, of another trainer than GRPO, or options of the command that are
            fields of the recipe.
    """
    for name, default in (("dtype", None), ("lora", None), ("tokenizer", None), ("random_weights", False)):
        if getattr(options, name) != default:
            raise ValueError(f"expected --{name.replace('_', '-')} with --model only: a recipe has fields for it")
    arguments, training, model = parse([options.rollouts, *fields])
    if arguments.trainer != "grpo":
        raise ValueError(f"expected a recipe with trainer: grpo, got {arguments.trainer!r}")
    check_processes(arguments, training)
    check_optimizer(training)
    training.max_steps, training.learning_rate, training.save_strategy, training.eval_strategy = 1, 0.0, "no", "no"
    with tempfile.TemporaryDirectory() as folder:
        training.output_dir = folder
        trainer = build_trainer(arguments, training, model)
        trainer.remove_callback(TrainReport)
        batches, seconds = _one_step(trainer)
    tokenizer, on = trainer.processing_class, trainer.args.device
    if options.device is not None and on.type != device.type:
        raise ValueError(f"expected --device to be where the recipe trains ({on.type}), got {device.type}")
    del trainer
    gc.collect()
    set_seed(training.seed)
    policy: Any = find_policy(arguments, training, model, tokenizer)
    if isinstance(policy, str):
        policy = AutoModelForCausalLM.from_pretrained(policy, **training.model_init_kwargs)
    peft = get_peft_config(model)
    if peft is not None:
        from peft import get_peft_model

        policy = get_peft_model(policy, peft)
    name = Path(options.rollouts).stem
    notes = ["a reference model is left out"] if training.beta else []
    return Subject(
        model=policy.to(on),
        groups=[RolloutGroup(name=name, rollouts=tuple(rows_of(batches)))],
        args=common_arguments(
            training, beta=0.0, tree_credit="trajectory", seed=options.seed, dataloader_pin_memory=False
        ),
        tokenizer=tokenizer,
        name=str(model.model_name_or_path or arguments.model_type),
        workload=name,
        about=", ".join([f"{options.rollouts}: one step of its rollouts", *notes]),
        sampling_seconds=seconds,
    )


def _one_step(trainer: Any) -> tuple[list[dict[str, Any]], float]:
    """TRL's batches of a step, and how long its rollouts took."""
    batches: list[dict[str, Any]] = []
    spent: list[float] = []
    add_slice, generate = trainer.tree_policy.add_slice, trainer._generate

    def keeping(batch: dict[str, Any]) -> None:
        batches.append(batch)
        add_slice(batch)

    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        found = generate(*args, **kwargs)
        spent.append(time.perf_counter() - started)
        return found

    trainer.tree_policy.add_slice, trainer._generate = keeping, timed
    trainer.train()
    return batches, sum(spent)


def rows_of(batches: Sequence[dict[str, Any]]) -> list[Rollout]:
    """The rows of TRL's batches without their padding; those that nothing is trained of are left out."""
    found = []
    for batch in batches:
        mask = batch["completion_mask"] * batch.get("tool_mask", 1)
        parts = [
            batch[key].cpu().numpy() for key in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        ]
        for prompt, is_prompt, completion, is_completion, trained in zip(*parts, mask.cpu().numpy(), strict=True):
            if trained.any():
                own = trained[is_completion != 0] != 0
                tokens = np.concatenate([prompt[is_prompt != 0], completion[is_completion != 0]])
                whole = np.concatenate([np.zeros(len(tokens) - len(own), bool), own])
                found.append(Rollout(token_ids=tokens.astype(np.int64), loss_mask=whole))
    return found
