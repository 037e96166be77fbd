"""`harts train RECIPE [--field value ...]`: trains a policy on rollout trees as a recipe says.

The recipe and the command line are read by `harts_hf.cli.recipe`. The output folder gets checkpoints, `metrics.jsonl`,
`reward.png` (`loss.png` of supervised training), `tree.png` and `summary.json`; those of an earlier run in it are
replaced, or continued with `--resume_from_checkpoint FOLDER`. `--dry-run` trains nothing: see `harts_hf.cli.dry_run`.
"""

import gc
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from transformers import set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.utils.logging import disable_progress_bar
from trl import get_peft_config

from harts_hf.cli.data import eval_dataset, train_dataset
from harts_hf.cli.output import printable, printable_lines, reader_is_gone, warnings_in_lines
from harts_hf.cli.policy import find_policy, named_tokenizer
from harts_hf.cli.recipe import parse, peek, split_recipe
from harts_hf.cli.signals import sigterm_interrupts
from harts_hf.cli.sources import find_source, reward_functions
from harts_hf.cli.supervised import build_supervised
from harts_hf.cli.train_arguments import PolicyArguments, TrainArguments
from harts_hf.cli.train_checks import check_folders, check_processes
from harts_hf.cli.train_report import TrainReport
from harts_hf.cli.trainer_kinds import TRAINERS
from harts_hf.errors import AllFailedError
from harts_hf.trainers.tree_options import check_optimizer


@warnings_in_lines()
def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit status."""
    recipe = split_recipe(argv)[0]
    _make_current_folder_importable()
    if _asks_for_dry_run(argv):
        from harts_hf.cli.dry_run import dry_run

        return dry_run(argv)
    arguments, training, model = parse(argv)
    check_processes(arguments, training)
    check_optimizer(training)
    check_folders(training, model, recipe)
    if not arguments.asks_for_bar:
        disable_progress_bar()  # of loading and saving weights, beside a line per log
    try:
        trainer = build_trainer(arguments, training, model)
        trainer.check_ready()  # what `train` would say too, but as an error of the recipe: without a traceback
        return _train(trainer)
    except SystemExit as stop:  # of an environment or a reward function: whatever its code, nothing was finished
        traceback.print_exc()
        got = printable(f"SystemExit({stop.code!r})")
        print(f"harts train: expected environments, agents and reward functions to return, got {got}", file=sys.stderr)
        return 1


def _make_current_folder_importable() -> None:
    # Last, so that nothing that is installed is shadowed by a file that happens to lie there.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())


def _asks_for_dry_run(argv: Sequence[str]) -> bool:
    # Before the recipe is parsed, which for many GPUs cannot be done with one process on a CPU.
    if argv and argv[-1] in ("--dry_run", "--dry-run"):
        return True
    said = peek(argv, "dry_run")  # of the option without a value: the option that follows
    return said is not None and str(said).lower() not in ("false", "f", "no", "n", "0")


def _train(trainer: Any) -> int:
    # What imports and the trainer made stays. Collections of garbage that walk it took a twentieth of the tiny recipe.
    gc.collect()
    gc.freeze()
    try:
        with sigterm_interrupts():
            trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
            trainer.save_model(trainer.args.output_dir)
    except AllFailedError as error:  # whose tracebacks are in the log
        print(f"harts train: {printable_lines(error)}", file=sys.stderr)
        return 1
    except Exception as error:  # of an environment or a reward function, as a rule: where it happened matters
        if isinstance(error, BrokenPipeError) and reader_is_gone():
            raise
        traceback.print_exc()
        return 1
    return 0


def build_trainer(arguments: TrainArguments, training: Any, model: PolicyArguments) -> Any:
    """Builds the trainer that a recipe describes, its report attached.

    Raises:
        ValueError: settings that contradict one another, a dotted path that leads nowhere, arguments that the
            environment or the model's configuration refuses.
    """
    if arguments.cpu_threads is not None:
        torch.set_num_threads(arguments.cpu_threads)
    set_seed(training.seed)
    kind = TRAINERS[arguments.trainer]
    if kind.is_supervised:
        return _reporting(build_supervised(arguments, training, model), arguments, None, measure="loss")
    tokenizer = named_tokenizer(arguments, training, model)
    source = find_source(arguments, training, tokenizer)
    kind.check(arguments.trainer, arguments.source, source.arguments)
    if tokenizer is None:
        if source.task is None:
            raise ValueError(
                "expected tokenizer, a folder or name, for a model_type without an environment or an agent that has "
                f"one, got none with {arguments.model_type}"
            )
        tokenizer = source.task.tokenizer()
    source.check(training, tokenizer)
    rewards = reward_functions(arguments, source)
    data = {"train_dataset": train_dataset(arguments, training, source)}
    data["eval_dataset"] = eval_dataset(arguments, training, source)
    trainer = kind.trainer(
        find_policy(arguments, training, model, tokenizer),
        rewards,
        args=training,
        processing_class=tokenizer,
        peft_config=get_peft_config(model),
        **data,
        **source.arguments,
    )
    return _reporting(trainer, arguments, source.collector, measure="reward")


def _reporting(trainer: Any, arguments: TrainArguments, collector: Any, *, measure: str) -> Any:
    """The trainer with its report attached."""
    # The report prints one line where these would print a dictionary, or a bar.
    trainer.remove_callback(PrinterCallback)
    if not arguments.asks_for_bar:
        trainer.remove_callback(ProgressCallback)
    trainer.add_callback(TrainReport(collector, measure=measure, prints_lines=not arguments.asks_for_bar))
    return trainer
