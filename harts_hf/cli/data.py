"""The data sets of a recipe: prompts to train on, and to evaluate."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset

from harts_hf.cli.sources import RolloutSource
from harts_hf.cli.train_arguments import TrainArguments

# Columns of prompts.
PROMPTS = (("prompt",),)
# Files by themselves, and how `datasets` calls their form.
FORMS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainPrompts:
    """What a trainer goes through.

    Attributes:
        dataset: of prompts; None where TRL's environments bring their own.
        number: how many prompts there are before any is repeated; None where nobody knows.
    """

    dataset: Any = None
    number: int | None = None

    @classmethod
    def of(cls, dataset: Any) -> "TrainPrompts":
        """A data set in which none is repeated, or a stream."""
        return cls(dataset=dataset, number=len(dataset) if hasattr(dataset, "__len__") else None)


def train_dataset(arguments: TrainArguments, training: Any, source: RolloutSource) -> Any:
    """The data set of :func:`train_prompts`."""
    return train_prompts(arguments, training, source).dataset


def train_prompts(arguments: TrainArguments, training: Any, source: RolloutSource) -> TrainPrompts:
    """Prompts to train on: of a data set, of the rollouts' source, or the environment's or agent's own, over and over.

    Raises:
        ValueError: there are none; rows without a prompt; no number of steps where prompts are gone through again and
            again.
    """
    if arguments.dataset_name is not None:
        return TrainPrompts.of(named_dataset(arguments, arguments.dataset_train_split, PROMPTS))
    if source.make_dataset is not None:
        return TrainPrompts.of(source.make_dataset())
    if source.plays_itself and source.collector is None:
        return TrainPrompts()  # TRL makes one
    prompts = _own_prompts(arguments, source, "train on")
    if training.max_steps < 1:
        raise ValueError(f"expected max_steps of at least 1 where no dataset is named, got {training.max_steps}")
    per_step = training.generation_batch_size // training.num_generations
    count = max(training.max_steps * per_step, len(prompts))
    dataset = Dataset.from_dict({"prompt": [prompts[index % len(prompts)] for index in range(count)]})
    return TrainPrompts(dataset=dataset, number=None if source.plays_itself else len(prompts))


def eval_dataset(arguments: TrainArguments, training: Any, source: RolloutSource) -> Any:
    """Prompts to evaluate; None without ``eval_strategy``.

    They are the data set's ``dataset_test_split``, or the ``eval_prompts()`` of the environment or agent (all of its
    ``prompts()`` where it has none), each once.

    Raises:
        ValueError: there are none.
    """
    if training.eval_strategy == "no":
        return None
    if arguments.dataset_name is not None:
        return named_dataset(arguments, arguments.dataset_test_split, PROMPTS)
    if source.make_dataset is not None:
        return source.make_dataset()
    return Dataset.from_dict({"prompt": _own_prompts(arguments, source, "evaluate")})


def _own_prompts(arguments: TrainArguments, source: RolloutSource, purpose: str) -> list[Any]:
    """Those of the environment or the agent; of a TRL environment an empty one, to which its reset adds the task."""
    if source.plays_itself:
        return [[{"role": "user", "content": ""}]]
    if source.task is None:
        raise ValueError(
            f"expected dataset_name, prompts to {purpose}, where rollouts come from {arguments.source or 'TRL'}, "
            "got none"
        )
    own = getattr(source.task, "eval_prompts", None) if purpose == "evaluate" else None
    return list((own or source.task.prompts)())


def named_dataset(arguments: TrainArguments, split: str, forms: Sequence[tuple[str, ...]]) -> Any:
    """A split of the recipe's ``dataset_name``: a file, or a data set of the hub.

    Args:
        arguments: the recipe's.
        split: which; a file by itself is any.
        forms: columns, of which the data set has to have all of one entry.

    Raises:
        ValueError: a file of no known form, other columns.
    """
    name = arguments.dataset_name
    assert name is not None
    options: dict[str, Any] = {"split": split, "streaming": arguments.dataset_streaming}
    path = Path(name)
    if path.is_file():
        if path.suffix not in FORMS:
            raise ValueError(f"expected a data set in a file of {', '.join(FORMS)}, got {name!r}")
        # A file is one split, whatever it is called for.
        rows = load_dataset(FORMS[path.suffix], data_files={split: name}, **options)
    else:
        rows = load_dataset(name, name=arguments.dataset_config, **options)
    columns = rows.column_names
    if columns is not None and not any(set(form) <= set(columns) for form in forms):
        wanted = " or ".join(" and ".join(map(repr, form)) for form in forms)
        raise ValueError(f"expected a column {wanted} in {name}, got {columns}")
    return rows
