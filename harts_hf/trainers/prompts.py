"""Batches of prompts that are read from the data set where one is used.

TRL asks its loader for the whole generation batch at every micro-step and uses the first of them: with ``k``
micro-steps in a generation, ``k`` times as many rows are read, and Accelerate looks through all of them for tensors to
move.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import datasets
from trl.trainer.utils import identity

from harts_hf.trainers.origins import is_from
from harts_hf.trainers.replacing import replaced

# What of a trainer sees batches as the loader gives them; code of a user's own may want lists.
SEE_BATCHES = (
    "training_step",
    "get_batch_samples",
    "_get_num_items_in_batch",
    "_prepare_inputs",
    "get_train_dataloader",
)


class Prompts(Sequence[Any]):
    """The rows of a batch, read when one is looked at.

    Args:
        dataset: a map-style one.
        indices: of its rows.
    """

    def __init__(self, dataset: Any, indices: list[int]) -> None:
        self._dataset, self._indices = dataset, indices

    @cached_property
    def rows(self) -> list[Any]:
        """A list of dictionaries, as the data set gives it."""
        found: list[Any] = self._dataset.__getitems__(self._indices)
        return found

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, place: Any) -> Any:
        return self.rows[place]

    def __contains__(self, value: object) -> bool:
        # Trainer asks for "labels", as of a dictionary; rows are no texts.
        return not isinstance(value, str) and value in self.rows

    def pin_memory(self) -> "Prompts":
        """As PyTorch asks for it: nothing of it is a tensor."""
        return self


class _Unread:
    """A data set whose batches are :class:`Prompts`; all else is the data set's own."""

    def __init__(self, dataset: datasets.Dataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices: list[int]) -> Prompts:
        return Prompts(self._dataset, indices)

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset":  # asked of a copy that has nothing yet
            raise AttributeError(name)
        return getattr(self._dataset, name)


class UnreadPrompts:
    """Mixin above a TRL trainer whose loader then gives :class:`Prompts`.

    Of a ``datasets.Dataset`` alone that gives plain Python values, in this process, to code of TRL's and ours: tensors
    would have to be moved, a transform may draw, and other code may want lists.
    """

    # What TRL's trainer sets.
    args: Any
    accelerator: Any
    train_dataset: Any
    data_collator: Any

    def get_train_dataloader(self) -> Any:
        """TRL's."""
        parent: Any = super()
        if not self._may_read_later():
            return parent.get_train_dataloader()
        with replaced(self, "train_dataset", _Unread(self.train_dataset)):
            return parent.get_train_dataloader()

    def _may_read_later(self) -> bool:
        dataset = self.train_dataset
        return (
            self.data_collator is identity
            and isinstance(dataset, datasets.Dataset)
            and dataset.format["type"] is None
            and not self.args.remove_unused_columns
            and self.args.dataloader_num_workers == 0
            and not self.accelerator.dispatch_batches
            and all(_is_known(getattr(self, name)) for name in SEE_BATCHES)
        )


def _is_known(method: Any) -> bool:
    return is_from(method, "trl", "harts_hf", "transformers")


def prepared(trainer: Any, batch: Any) -> Any:
    """What a trainer's ``_prepare_inputs`` makes of a batch; what generates from it gets a list."""
    if not isinstance(batch, Prompts):
        return trainer._prepare_inputs(batch)
    score, name = trainer._generate_and_score_completions, "_generate_and_score_completions"
    with replaced(trainer, name, lambda prompts: score(prompts.rows)):
        return trainer._prepare_inputs(batch)
