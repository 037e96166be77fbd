"""The data sets of a recipe: prompts to train on, and to evaluate."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset

from harts_hf.cli.sources import RolloutSource
from harts_hf.cli.train_arguments import TrainArguments

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
        return _whole(_named(arguments, arguments.dataset_train_split))
    if source.make_dataset is not None:
        return _whole(source.make_dataset())
    if source.plays_itself and source.collector is None:
        return TrainPrompts()  # TRL makes one
    prompts = _own_prompts(arguments, source, "train on")
    if training.max_steps < 1:
        raise ValueError(f"expected max_steps of at least 1 where no dataset is named, got {training.max_steps}")
    per_step = training.generation_batch_size // training.num_generations
    count = max(training.max_steps * per_step, len(prompts))
    dataset = Dataset.from_dict({"prompt": [prompts[index % len(prompts)] for index in range(count)]})
    return TrainPrompts(dataset=dataset, number=None if source.plays_itself else len(prompts))


def _whole(dataset: Any) -> TrainPrompts:
    return TrainPrompts(dataset=dataset, number=len(dataset) if hasattr(dataset, "__len__") else None)  # or a stream


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
        return _named(arguments, arguments.dataset_test_split)
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


def _named(arguments: TrainArguments, split: str) -> Any:
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
    if rows.column_names is not None and "prompt" not in rows.column_names:
        raise ValueError(f"expected a column 'prompt' in {name}, got {rows.column_names}")
    return rows
