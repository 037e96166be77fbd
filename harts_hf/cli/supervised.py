"""Supervised training (`trainer: sft`): the rows of a recipe, and the trainer that it describes."""

from collections.abc import Callable
from typing import Any, cast

from trl import get_peft_config

from harts_hf.cli.data import named_dataset
from harts_hf.cli.policy import find_policy, named_tokenizer
from harts_hf.cli.sources import load_callable
from harts_hf.cli.train_arguments import PolicyArguments, TrainArguments
from harts_hf.cli.trainer_kinds import TRAINERS
from harts_hf.rollouts.supervised import WEIGHTS, supervised_dataset

# What rows may be, in TRL's conventions: columns, of which a data set has all of one entry.
FORMS = (("input_ids",), ("messages",), ("conversations",), ("prompt", "completion"), ("text",))


def check_rows_named(arguments: TrainArguments) -> None:
    """Raises ValueError for what supervised training has no use for, and where not one source of rows is named."""
    source = arguments.source
    if source not in (None, "recorded_rollouts"):
        raise ValueError(
            "expected dataset_name or recorded_rollouts with trainer 'sft' (rows that are there already), got "
            f"{source}"
        )
    for name in ("reward_funcs", "tools"):
        if getattr(arguments, name):
            raise ValueError(f"expected no {name} with trainer 'sft', got {getattr(arguments, name)!r}")
    if (arguments.dataset_name is None) == (source is None):
        got = "both" if source else "neither"
        raise ValueError(f"expected either dataset_name or recorded_rollouts with trainer 'sft', got {got}")


def train_rows(arguments: TrainArguments, tokenizer: Any) -> Any:
    """The data set to train on: a named one in any of TRL's forms, or the rows of recorded rollouts.

    Raises:
        ValueError: columns of no form; options that do not fit, a row that its form does not allow.
    """
    if arguments.dataset_name is not None:
        return named_dataset(arguments, arguments.dataset_train_split, FORMS)
    options = dict(cast(dict, arguments.recorded_kwargs))
    weight = options.pop("weight", None)
    try:
        return supervised_dataset(arguments.recorded_rollouts, tokenizer=tokenizer, weight=_weight(weight), **options)
    except TypeError as error:  # an option that it does not know
        raise ValueError(f"recorded_kwargs do not fit supervised_dataset: {error}") from error


def eval_rows(arguments: TrainArguments, training: Any) -> Any:
    """The data set's ``dataset_test_split``; None without ``eval_strategy``.

    Raises:
        ValueError: recorded rollouts, which have no split.
    """
    if training.eval_strategy == "no":
        return None
    if arguments.dataset_name is None:
        raise ValueError(
            "expected dataset_name to evaluate on (its dataset_test_split), or eval_strategy 'no', got "
            f"eval_strategy {training.eval_strategy.value!r} with recorded_rollouts"
        )
    return named_dataset(arguments, arguments.dataset_test_split, FORMS)


def rows_tokenizer(arguments: TrainArguments, training: Any, model: PolicyArguments) -> Any:
    """The recipe's tokenizer.

    Raises:
        ValueError: none is named.
    """
    tokenizer = named_tokenizer(arguments, training, model)
    if tokenizer is None:
        raise ValueError(
            f"expected tokenizer, a folder or name, for a model_type with trainer 'sft', got none with "
            f"{arguments.model_type}"
        )
    tokenizer.padding_side = tokenizer.truncation_side = "right"  # named_tokenizer's are for prompts
    return tokenizer


def build_supervised(arguments: TrainArguments, training: Any, model: PolicyArguments) -> Any:
    """The trainer that a recipe describes.

    Raises:
        ValueError: as the functions above, and settings that the trainer refuses.
    """
    check_rows_named(arguments)
    tokenizer = rows_tokenizer(arguments, training, model)
    return make_supervised(
        arguments,
        training,
        model,
        tokenizer,
        train_dataset=train_rows(arguments, tokenizer),
        eval_dataset=eval_rows(arguments, training),
        policy=find_policy(arguments, training, model, tokenizer),
    )


def make_supervised(
    arguments: TrainArguments, training: Any, model: PolicyArguments, tokenizer: Any, *, policy: Any, **data: Any
) -> Any:
    """The trainer, of all that it is made of."""
    return TRAINERS[arguments.trainer].trainer(
        policy, training, processing_class=tokenizer, peft_config=get_peft_config(model), **data
    )


def _weight(name: Any) -> str | Callable[[float, Any], float] | None:
    """A weight by its name, or a function by its dotted path."""
    if isinstance(name, str) and name not in WEIGHTS:
        function: Callable[[float, Any], float] = load_callable(
            "recorded_kwargs.weight", name, f"{', '.join(map(repr, WEIGHTS))}, or the dotted path of a function"
        )
        return function
    return cast(str | None, name)
