"""`harts train RECIPE [--field value ...]`: trains a policy on rollout trees as a recipe says.

The recipe and the command line are read by `harts_hf.cli.recipe`. The output folder gets checkpoints, `metrics.jsonl`,
`reward.png`, `tree.png` and `summary.json`; those of an earlier run in it are replaced, or continued with
`--resume_from_checkpoint FOLDER`.
"""

import functools
import gc
import math
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from datasets import Dataset, load_dataset
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from trl import ModelConfig, get_peft_config, get_quantization_config

from harts_hf.cli.checks import check_output_folder, refuse_to_overwrite
from harts_hf.cli.output import printable, reader_is_gone
from harts_hf.cli.recipe import parse, split_recipe, unknown_message
from harts_hf.cli.signals import sigterm_interrupts
from harts_hf.cli.train_arguments import FORK_OPTIONS, TrainArguments
from harts_hf.cli.train_report import REPORT_FILES, TrainReport
from harts_hf.rollouts.collector import TreeRolloutCollector, environment_reward
from harts_hf.rollouts.environment import Environment, load_object
from harts_hf.rollouts.forks import EARLY_ENDS, EarlyEnds, ForkPolicy, NoForks, TurnForks
from harts_hf.rollouts.growing_forks import BudgetForks, EntropyForks
from harts_hf.trainers import TreeGRPOConfig, TreeGRPOTrainer


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit status."""
    arguments, training, model = parse(argv)
    _check_numbers(training)
    _check_folders(training, model, split_recipe(argv)[0])
    try:
        return _train(build_trainer(arguments, training, model))
    except SystemExit as stop:  # of an environment or a reward function: whatever its code, nothing was finished
        traceback.print_exc()
        got = printable(f"SystemExit({stop.code!r})")
        print(f"harts train: expected environments, agents and reward functions to return, got {got}", file=sys.stderr)
        return 1


def _train(trainer: TreeGRPOTrainer) -> int:
    # What imports and the trainer made stays. Collections of garbage that walk it took a twentieth of the tiny recipe.
    gc.collect()
    gc.freeze()
    try:
        with sigterm_interrupts():
            trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
            trainer.save_model(trainer.args.output_dir)
    except Exception as error:  # of an environment or a reward function, as a rule: where it happened matters
        if isinstance(error, BrokenPipeError) and reader_is_gone():
            raise
        traceback.print_exc()
        return 1
    return 0


def _check_numbers(training: TreeGRPOConfig) -> None:
    """Checks what the optimizer would refuse only when the training begins."""
    for name in ("learning_rate", "weight_decay", "adam_epsilon"):
        value = getattr(training, name)
        if not 0 <= value < math.inf:  # NaN, too
            raise ValueError(f"expected {name} to be a finite number of at least 0, got {value}")
    for name in ("adam_beta1", "adam_beta2"):
        value = getattr(training, name)
        if not 0 <= value < 1:
            raise ValueError(f"expected {name} in [0, 1), got {value}")


def _check_folders(training: TreeGRPOConfig, model: ModelConfig, recipe: str | None) -> None:
    assert training.output_dir is not None
    refuse_to_overwrite(training.output_dir, model.model_name_or_path)
    for name in REPORT_FILES:
        refuse_to_overwrite(os.path.join(training.output_dir, name), recipe)
    check_output_folder("output_dir", training.output_dir)
    checkpoint = training.resume_from_checkpoint
    if checkpoint is not None and not (Path(checkpoint) / TRAINER_STATE_NAME).is_file():
        raise ValueError(
            f"expected resume_from_checkpoint to be a checkpoint's folder (with {TRAINER_STATE_NAME}), "
            f"got {checkpoint!r}"
        )


def build_trainer(arguments: TrainArguments, training: TreeGRPOConfig, model: ModelConfig) -> TreeGRPOTrainer:
    """Builds the trainer that a recipe describes, its report attached.

    Raises:
        ValueError: settings that contradict one another, a dotted path that leads nowhere, arguments that the
            environment or the model's configuration refuses.
    """
    if arguments.cpu_threads is not None:
        torch.set_num_threads(arguments.cpu_threads)
    set_seed(training.seed)
    collector, sample, own_reward = _rollouts(arguments, training)
    policy, tokenizer = _policy(arguments, training, model, sample)
    collector.check(training)
    rewards = [_reward_function(path) for path in arguments.reward_funcs or []] or [own_reward]
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


def _rollouts(arguments: TrainArguments, training: TreeGRPOConfig) -> tuple[Any, Any, Any]:
    """What collects rollouts, who knows the task's prompts and tokenizer, and the reward function by default."""
    if arguments.environment is None:
        return _agent_rollouts(arguments)
    make_environment = _environment_factory(arguments)
    assert training.num_generations is not None
    trees = TreeRolloutCollector(
        make_environment,
        fork_policy=_fork_policy(arguments, training.num_generations),
        max_turns=arguments.max_turns,
        max_turn_tokens=arguments.max_turn_tokens,
    )
    return trees, make_environment(), environment_reward


def _agent_rollouts(arguments: TrainArguments) -> tuple[Any, Any, Any]:
    try:
        from harts_hf.rollouts.gateway import AgentRolloutCollector, agent_reward
    except ImportError as error:  # its web server and client are an extra
        raise ValueError(f"agents need the extra 'agents' (pip install 'harts_hf[agents]'): {error}") from error
    if arguments.agent_command:
        agent: Any = arguments.agent_command
    else:
        assert isinstance(arguments.agent, str) and isinstance(arguments.agent_kwargs, dict)
        agent = _load("agent", arguments.agent, "a function, or a subclass of Agent")
        if isinstance(agent, type) or arguments.agent_kwargs:
            try:
                make = agent if isinstance(agent, type) else functools.partial(functools.partial, agent)
                agent = make(**arguments.agent_kwargs)
            except TypeError as error:  # a keyword argument that the class does not know
                raise ValueError(f"agent_kwargs do not fit {arguments.agent}: {error}") from error
    collector = AgentRolloutCollector(
        agent,
        max_turns=arguments.max_turns,
        max_turn_tokens=arguments.max_turn_tokens,
        timeout=arguments.agent_timeout,
        max_concurrent=arguments.agent_concurrency,
    )
    return collector, collector.agent, agent_reward


def _fork_policy(arguments: TrainArguments, num_generations: int) -> ForkPolicy:
    unused = [name for name in FORK_OPTIONS["turn"] if getattr(arguments, name) is not None]
    if unused and arguments.fork_policy != "turn":
        print(f"fork_policy {arguments.fork_policy} does not use {' and '.join(unused)}", file=sys.stderr)
    if arguments.fork_policy == "none":
        return NoForks()
    if arguments.fork_policy == "entropy":
        return EntropyForks(roots=arguments.fork_roots)
    if arguments.fork_policy == "budget":
        assert arguments.fork_budget is not None
        return BudgetForks(tokens=arguments.fork_budget, roots=arguments.fork_roots)
    branching = tuple(arguments.branching or [num_generations])
    fork_turns = tuple(range(len(branching)) if arguments.fork_turns is None else arguments.fork_turns)
    early_ends = cast(EarlyEnds, arguments.early_ends or EARLY_ENDS[0])
    return TurnForks(branching=branching, fork_turns=fork_turns, early_ends=early_ends)


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
    arguments: TrainArguments, training: TreeGRPOConfig, model: ModelConfig, task: Any
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
    tokenizer = task.tokenizer()
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
            raise ValueError(unknown_message([f"model_config.{name}" for name in unknown], set()))
        policy = AutoModelForCausalLM.from_config(config, attn_implementation=model.attn_implementation)
    except Exception as error:  # every configuration and model class has its own
        raise ValueError(
            f"expected model_config to be fields of a {arguments.model_type} configuration: {error}"
        ) from error
    return policy, tokenizer


def _fields_of(config: Any) -> set[str]:
    # A configuration takes any keyword silently, so a misspelt one would leave the default in place.
    return set(type(config)().to_dict()) | set(type(config).attribute_map)


def _dataset(arguments: TrainArguments, training: TreeGRPOConfig, task: Any) -> Dataset:
    if arguments.dataset_name is not None:
        rows = load_dataset(arguments.dataset_name, name=arguments.dataset_config, split=arguments.dataset_train_split)
        if "prompt" not in rows.column_names:
            raise ValueError(f"expected a column 'prompt' in {arguments.dataset_name}, got {rows.column_names}")
        return rows
    prompts = task.prompts()
    if training.max_steps < 1:
        raise ValueError(f"expected max_steps of at least 1 where no dataset is named, got {training.max_steps}")
    assert training.generation_batch_size is not None and training.num_generations is not None
    per_step = training.generation_batch_size // training.num_generations
    count = max(training.max_steps * per_step, len(prompts))
    return Dataset.from_dict({"prompt": [prompts[index % len(prompts)] for index in range(count)]})
