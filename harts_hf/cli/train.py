"""`harts train RECIPE [--field value ...]`: trains a policy on rollout trees as a recipe says.

A recipe is a TRL YAML file: every field of `TreeGRPOConfig`, of TRL's `ModelConfig` and of `TrainArguments`. The
command line overrides it. The output folder gets checkpoints, `metrics.jsonl`, `reward.png`, `tree.png` and
`summary.json`; those of an earlier run in it are replaced, or continued with `--resume_from_checkpoint FOLDER`.
"""

import difflib
import functools
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from harts_hf.cli.checks import check_output_folder
from harts_hf.cli.train_arguments import TrainArguments
from harts_hf.cli.train_report import TrainReport
from harts_hf.rollouts.collector import TreeRolloutCollector, environment_reward
from harts_hf.rollouts.environment import Environment, load_object
from harts_hf.trainers import TreeGRPOConfig, TreeGRPOTrainer


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit status."""
    arguments, training, model = parse(argv)
    _check_folders(training)
    trainer = build_trainer(arguments, training, model)
    try:
        trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
        trainer.save_model(training.output_dir)
    except BrokenPipeError:
        raise
    except Exception:  # of an environment or a reward function, as a rule: where it happened matters
        traceback.print_exc()
        return 1
    return 0


def _check_folders(training: TreeGRPOConfig) -> None:
    assert training.output_dir is not None
    check_output_folder("output_dir", training.output_dir)
    checkpoint = training.resume_from_checkpoint
    if checkpoint is not None and not (Path(checkpoint) / TRAINER_STATE_NAME).is_file():
        raise ValueError(
            f"expected resume_from_checkpoint to be a checkpoint's folder (with {TRAINER_STATE_NAME}), "
            f"got {checkpoint!r}"
        )


def parse(argv: Sequence[str]) -> tuple[TrainArguments, TreeGRPOConfig, ModelConfig]:
    """Reads the recipe and the command line.

    Args:
        argv: the recipe's path, then ``--field value`` pairs; the recipe may be left out.

    Raises:
        ValueError: a recipe that is not a mapping; an unknown key (named); a value that its field refuses.
        OSError: no such recipe.
        SystemExit: help was asked for, or a value has the wrong type (argparse prints which).
    """
    options = list(argv)
    if options and not options[0].startswith("-"):
        options.insert(0, "--config")
    types: Any = (TrainArguments, TreeGRPOConfig, ModelConfig)
    parser = TrlParser(
        types,
        prog="harts train",
        usage="harts train RECIPE [--field value ...]",
        description=__doc__,
        allow_abbrev=False,
    )
    try:
        *parsed, unknown_in_recipe, unknown_in_command = parser.parse_args_and_config(
            options, return_remaining_strings=True, separate_remaining_strings=True
        )
    except ZeroDivisionError as error:  # TRL divides by it before it checks it
        raise ValueError("expected num_generations of at least 2, got 0") from error
    known = {action.dest for action in parser._actions}
    unknown = [key for key in (*unknown_in_recipe[::2], *unknown_in_command) if key.startswith("--")]
    if unknown or unknown_in_command:
        raise ValueError(_unknown_message(unknown or unknown_in_command, known))
    arguments, training, model = parsed
    return arguments, training, model


def build_trainer(arguments: TrainArguments, training: TreeGRPOConfig, model: ModelConfig) -> TreeGRPOTrainer:
    """Builds the trainer that a recipe describes, its report attached.

    Raises:
        ValueError: settings that contradict one another, a dotted path that leads nowhere, arguments that the
            environment or the model's configuration refuses.
    """
    if arguments.cpu_threads is not None:
        torch.set_num_threads(arguments.cpu_threads)
    set_seed(training.seed)
    make_environment = _environment_factory(arguments)
    sample = make_environment()
    policy, tokenizer = _policy(arguments, training, model, sample)
    assert training.num_generations is not None
    collector = TreeRolloutCollector(
        make_environment,
        branching=tuple(arguments.branching or [training.num_generations]),
        fork_turns=None if arguments.fork_turns is None else tuple(arguments.fork_turns),
        max_turns=arguments.max_turns,
        max_turn_tokens=arguments.max_turn_tokens,
    )
    collector.check(training)
    rewards = [_reward_function(path) for path in arguments.reward_funcs or []] or [environment_reward]
    trainer = TreeGRPOTrainer(
        policy,
        rewards,
        args=training,
        train_dataset=_dataset(arguments, training, sample),
        processing_class=tokenizer,
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
        rollout_func=collector,
    )
    # The report prints one line where these would print a dictionary, or a bar.
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(TrainReport(collector))
    return trainer


def _environment_factory(arguments: TrainArguments) -> functools.partial[Environment]:
    assert isinstance(arguments.environment, str) and isinstance(arguments.environment_kwargs, dict)
    environment_class = _load("environment", arguments.environment, "a subclass of Environment")
    if not (isinstance(environment_class, type) and issubclass(environment_class, Environment)):
        raise ValueError(f"expected environment to be a subclass of Environment, got {environment_class!r}")
    factory = functools.partial(environment_class, **arguments.environment_kwargs)
    try:
        factory()
    except TypeError as error:  # a keyword argument that the class does not know
        raise ValueError(f"environment_kwargs do not fit {arguments.environment}: {error}") from error
    return factory


def _reward_function(path: str) -> Any:
    function = _load("reward_funcs", path, "a function that returns rewards")
    if not callable(function):
        raise ValueError(f"expected reward_funcs to name functions, got {function!r} (from {path!r})")
    return function


def _load(field: str, path: str, what: str) -> Any:
    try:
        return load_object(path)
    except ValueError as error:
        raise ValueError(
            f"expected {field} to be the dotted path of {what}, package.module:Name, of a module that is installed or "
            f"on PYTHONPATH: {error}"
        ) from error


def _policy(
    arguments: TrainArguments, training: TreeGRPOConfig, model: ModelConfig, environment: Environment
) -> tuple[str | PreTrainedModel, PreTrainedTokenizerBase | None]:
    """The policy as the trainer takes it (a name, or a model with random weights), and its tokenizer if known."""
    names = [name for name in (model.model_name_or_path, arguments.model_type) if name]
    if len(names) != 1:
        got = " and ".join(names) + " (--model_type '' unsets it)" if names else "neither"
        raise ValueError(f"expected either model_name_or_path or model_type, got {got}")
    if model.model_name_or_path:
        given = {"revision": model.model_revision, "attn_implementation": model.attn_implementation}
        assert not isinstance(training.model_init_kwargs, str)
        training.model_init_kwargs = {**given, "dtype": model.dtype, **(training.model_init_kwargs or {})}
        return model.model_name_or_path, None
    if training.beta != 0 and not model.use_peft:
        raise ValueError(
            "expected beta 0 for random weights (model_type), because TRL loads the reference model by the policy's "
            f"name; got {training.beta}"
        )
    tokenizer = environment.tokenizer()
    assert arguments.model_type is not None and isinstance(arguments.model_config, dict)
    fields = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        **arguments.model_config,
    }
    try:
        config = AutoConfig.for_model(arguments.model_type, **fields)
        unknown = [name for name in arguments.model_config if name not in _fields_of(config)]
        if unknown:
            raise ValueError(_unknown_message([f"model_config.{name}" for name in unknown], set()))
        policy = AutoModelForCausalLM.from_config(config, attn_implementation=model.attn_implementation)
    except Exception as error:  # every configuration and model class has its own
        raise ValueError(
            f"expected model_config to be fields of a {arguments.model_type} configuration: {error}"
        ) from error
    return policy, tokenizer


def _fields_of(config: Any) -> set[str]:
    # A configuration takes any keyword silently, so a misspelt one would leave the default in place.
    return set(type(config)().to_dict()) | set(type(config).attribute_map)


def _dataset(arguments: TrainArguments, training: TreeGRPOConfig, environment: Environment) -> Dataset:
    if arguments.dataset_name is not None:
        rows = load_dataset(arguments.dataset_name, name=arguments.dataset_config, split=arguments.dataset_train_split)
        if "prompt" not in rows.column_names:
            raise ValueError(f"expected a column 'prompt' in {arguments.dataset_name}, got {rows.column_names}")
        return rows
    prompts = environment.prompts()
    if training.max_steps < 1:
        raise ValueError(f"expected max_steps of at least 1 where no dataset is named, got {training.max_steps}")
    assert training.generation_batch_size is not None and training.num_generations is not None
    per_step = training.generation_batch_size // training.num_generations
    count = max(training.max_steps * per_step, len(prompts))
    return Dataset.from_dict({"prompt": [prompts[index % len(prompts)] for index in range(count)]})


def _unknown_message(names: Sequence[str], known: set[str]) -> str:
    parts = []
    for name in names:
        name = name.lstrip("-")
        close = difflib.get_close_matches(name, known, n=1)
        parts.append(f"{name!r}" + (f" (did you mean {close[0]!r}?)" if close else ""))
    return f"unknown key {', '.join(parts)}"
