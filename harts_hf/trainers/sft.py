"""Supervised fine-tuning on conversations that share their histories."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import nn
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from harts_hf.errors import HartsWarning, UnsupportedModelError
from harts_hf.modeling.checkpointing import check_keys
from harts_hf.rollouts.arrays import number_array
from harts_hf.rollouts.fields import shortened
from harts_hf.trainers.field_checks import FLAG, TEXT, check_fields, integer
from harts_hf.trainers.hooks import TreeHooks
from harts_hf.trainers.sft_policy import WEIGHT, TreeTexts, check_weighted_loss
from harts_hf.trainers.step import TreeStep
from harts_hf.trainers.together import TogetherSampler, rows_by_key, rows_together
from harts_hf.trainers.tree_options import TreeOptions


def _finite_weights(values: Sequence[Any]) -> torch.Tensor:
    """The column ``weight`` of rows: ``[B]`` float32.

    Raises:
        ValueError: what is no number (None in a row without one), not finite, or not in float32.
    """
    found = number_array(values) if len(values) else np.zeros(0)
    if found is None:
        row = next((row for row, value in enumerate(values) if number_array([value]) is None), 0)
    else:
        weights = torch.tensor(found, dtype=torch.float32)
        if weights.isfinite().all():
            return weights
        row = int((~weights.isfinite()).nonzero()[0])
    raise ValueError(f"expected finite numbers in the column {WEIGHT!r}, got {shortened(values[row])} in row {row}")


@dataclass
class TreeSFTConfig(TreeOptions, SFTConfig):
    r"""
    Configuration class for the [`TreeSFTTrainer`]: every parameter of [`SFTConfig`], those of [`TreeOptions`], and:

    Parameters:
        tree_keep_together (`bool`, *optional*, defaults to `True`):
            Whether rows that begin alike (the turns of a conversation) come in one optimizer step, where they share
            what they have in common. Which rows are in a step is random either way.
        tree_group_column (`str`, *optional*):
            Column whose equal values mark rows that belong together (an id of the conversation), instead of comparing
            tokens.
    """

    tree_keep_together: bool = field(
        default=True,
        metadata={"help": "Whether rows that begin alike come in one optimizer step, where they share."},
    )
    tree_group_column: str | None = field(
        default=None,
        metadata={"help": "Column whose equal values mark rows that belong together, instead of comparing tokens."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_tree_options()
        kinds = {"tree_keep_together": FLAG, "tree_group_column": TEXT.or_none(), "max_length": integer(1).or_none()}
        check_fields(self, kinds)


@dataclass
class WeightedCollator(DataCollatorForLanguageModeling):
    """TRL's collator, which also hands on the column ``weight``: ``[B]`` float32."""

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """See TRL's.

        Raises:
            ValueError: a weight that is no finite number, or none in float32.
        """
        batch = super().torch_call(examples)
        if any(WEIGHT in example for example in examples):
            batch[WEIGHT] = _finite_weights([example.get(WEIGHT) for example in examples])
        return batch


class TreeSFTTrainer(TreeHooks, SFTTrainer, TreeStep):
    """[`SFTTrainer`] that computes every token shared by the rows of an optimizer step once.

    Data conventions, loss, gradients and metrics are TRL's: its loss runs unchanged on log-probs that a tree forward
    computed. There is no scoring pass, except with ``loss_type="dft"``. A column ``weight`` of the data set multiplies
    the loss of its row (0 leaves it out of the sum, not out of the number of tokens that the sum is divided by).
    Constructor arguments are [`SFTTrainer`]'s, with a [`TreeSFTConfig`].

    Raises:
        UnsupportedModelError: a model or a setting that tree training would get wrong; the message names it.
        ValueError: columns that are not there, weights that are no finite numbers.
    """

    _tag_names = ["trl", "sft", "harts"]  # noqa: RUF012 - TRL's own convention
    _config_class = TreeSFTConfig
    router_loss = "computed"
    temperature = 1.0
    # Whether the data set has a column of weights.
    has_weights = False
    # What checkpoints keep of a generation batch: there is none.
    _step = 0
    _buffered_inputs = None

    def __init__(self, model: Any, args: Any = None, data_collator: Any = None, *more: Any, **kwargs: Any) -> None:
        args = self._checked_arguments(args)
        _refuse(args, kwargs)
        _check_rows(kwargs.get("train_dataset", more[0] if more else None), args, kwargs)
        # Past TreeHooks, whose constructor is that of trainers with reward functions.
        self._begin_trl(super(TreeHooks, self), model, args, data_collator, *more, **kwargs)
        if type(self.data_collator) is DataCollatorForLanguageModeling:
            self.data_collator = WeightedCollator(**vars(self.data_collator))
        self._check_columns()
        self._begin_tree(TreeTexts)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """TRL's, on what the tree says of the labels."""
        if return_outputs:
            raise UnsupportedModelError(
                "expected losses without logits (prediction_loss_only=True), got compute_metrics or "
                "preprocess_logits_for_metrics: evaluate with the stock SFTTrainer"
            )

        def on_tree(**batch: Any) -> Any:
            return self._tree.answer(model, batch)

        return SFTTrainer.compute_loss(self, on_tree, inputs, num_items_in_batch=num_items_in_batch)

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        self._signature_columns: Any = sorted({*(self._signature_columns or []), WEIGHT})

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Trainer's, or one that keeps rows that begin alike in one step."""
        args, rows = self.args, self.train_dataset
        if not args.tree_keep_together or args.train_sampling_strategy != "random" or not isinstance(rows, Dataset):
            return super()._get_train_sampler(train_dataset)
        num_ranks = self.accelerator.num_processes
        per_step = args.train_batch_size * args.gradient_accumulation_steps * num_ranks
        if args.tree_group_column is None:
            groups = rows_together(rows.with_format("numpy", columns=["input_ids"])["input_ids"], per_step)
        else:
            groups = rows_by_key(rows[args.tree_group_column], per_step)
        seed = args.data_seed if args.data_seed is not None else args.seed
        return TogetherSampler(
            groups,
            batch_size=args.train_batch_size,
            accumulation=args.gradient_accumulation_steps,
            num_ranks=num_ranks,
            seed=seed,
        )

    def _check_columns(self) -> None:
        rows, args = self.train_dataset, self.args
        if not isinstance(rows, Dataset):
            if args.tree_keep_together:
                warnings.warn(
                    "rows of an IterableDataset come in its own order: those that begin alike share only where they "
                    "come in one optimizer step (tree_keep_together=False silences this)",
                    HartsWarning,
                    stacklevel=3,
                )
            return
        if not len(rows):
            raise ValueError(
                "expected rows with labels, got none: TRL leaves out rows whose labels are all cut off, here by "
                f"max_length={args.max_length}"
            )
        name = args.tree_group_column
        if name is not None and name not in rows.column_names:
            raise ValueError(
                f"expected the data set to have the column tree_group_column={name!r}, got {rows.column_names}"
            )
        self.has_weights = WEIGHT in rows.column_names
        if self.has_weights:
            _finite_weights(list(rows[WEIGHT]))
            check_weighted_loss(args.loss_type)
        if args.max_length is not None:
            cut = sum(len(row) >= args.max_length for row in rows["input_ids"])
            if cut:
                warnings.warn(
                    f"{cut} of {len(rows)} rows have max_length={args.max_length} tokens and were probably cut there "
                    "(TRL's default is 1024): set max_length to the longest history, or null for no limit",
                    HartsWarning,
                    stacklevel=3,
                )


def _check_rows(rows: Any, args: TreeSFTConfig, kwargs: dict[str, Any]) -> None:
    """Before TRL makes its columns of them; it names data sets of other types itself."""
    if not isinstance(rows, Dataset):
        return
    if not len(rows):
        raise ValueError("expected a train_dataset with rows, got an empty one")
    preparing: Any = args.dataset_kwargs or {}
    is_prepared = kwargs.get("formatting_func") is not None or preparing.get("skip_prepare_dataset")
    forms = [("input_ids",), ("messages",), ("conversations",), ("prompt", "completion"), (args.dataset_text_field,)]
    if not is_prepared and not any(set(form) <= set(rows.column_names) for form in forms):
        raise ValueError(
            f"expected a train_dataset with the column input_ids, messages, prompt and completion, or "
            f"{args.dataset_text_field}, got {', '.join(rows.column_names)}"
        )


def _refuse(args: TreeSFTConfig, kwargs: dict[str, Any]) -> None:
    checkpointing: Any = args.activation_checkpointing_kwargs
    check_keys(checkpointing)  # before TRL takes out what the tree has no use for
    refused = [
        (args.packing, "packing=True (a tree has no padding): set packing=False"),
        (args.eval_packing, "eval_packing=True (a tree has no padding): leave eval_packing out"),
        (args.padding_free, "padding_free=True (a tree has no padding): set padding_free=False"),
        (args.label_smoothing_factor != 0, "label_smoothing_factor: it needs all logits"),
        (kwargs.get("compute_loss_func") is not None, "compute_loss_func: override compute_loss instead"),
        (kwargs.get("compute_metrics") is not None, "compute_metrics: it needs all logits"),
        (kwargs.get("preprocess_logits_for_metrics") is not None, "preprocess_logits_for_metrics: it needs logits"),
        (args.activation_offloading, "activation_offloading=True"),
    ]
    for wrong, got in refused:
        if wrong:
            raise UnsupportedModelError(f"expected a setting that tree training supports, got {got}")
