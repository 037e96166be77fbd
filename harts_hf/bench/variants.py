"""Trainers that are TRL's or the tree's but for one thing: old log-probs that are scored, or sorted rows."""

from collections.abc import Sequence
from typing import Any

import torch
from trl import GRPOTrainer

from harts_hf.trainers import TreeGRPOTrainer


class ScoresOld:
    """Mixin above a GRPO trainer that has TRL score old log-probs, as it does for users of an engine.

    TRL leaves that out where rollouts are known to be of the current weights; here it is told otherwise.

    Attributes:
        old_log_probs: ``[C]`` of each row's completion, as TRL scored them last.
    """

    old_log_probs: Sequence[torch.Tensor] = ()
    num_iterations: Any

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        parent: Any = super()
        before = self.num_iterations
        self.num_iterations = before + 1
        try:
            output: dict[str, Any] = parent._generate_and_score_completions(inputs)
        finally:
            self.num_iterations = before
        masks = output["completion_mask"].bool()
        self.old_log_probs = [row[mask].cpu() for row, mask in zip(output["old_per_token_logps"], masks, strict=True)]
        return output


class ScoringGRPOTrainer(ScoresOld, GRPOTrainer):
    """Stock, with old log-probs."""


class ScoringTreeGRPOTrainer(ScoresOld, TreeGRPOTrainer):  # type: ignore[misc]
    """Tree, with old log-probs."""


class SortingBatches:
    """Mixin above a stock trainer: rows of a step sorted by length, each batch without columns of padding alone.

    TRL shuffles rows and pads all to the longest of the step.
    """

    _step: int
    _buffered_inputs: Any
    args: Any

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        parent: Any = super()
        inputs: dict[str, Any] = parent._prepare_inputs(generation_batch)
        steps = self.args.steps_per_generation
        if self._step % steps == 0:
            self._buffered_inputs = sorted_batches(self._buffered_inputs)
            inputs = self._buffered_inputs[0]
        return inputs


def sorted_batches(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """TRL's batches with the rows of all of them in order of length, without columns that are padding alone.

    Args:
        batches: equally many rows each; tensors without dimensions are the same in each.
    """
    joined = {
        key: torch.cat([batch[key] for batch in batches]) if value.dim() else value
        for key, value in batches[0].items()
        if isinstance(value, torch.Tensor)
    }
    order = (joined["prompt_mask"].sum(1) + joined["completion_mask"].sum(1)).argsort(stable=True)
    size = len(order) // len(batches)
    return [_trimmed(joined, order[start : start + size]) for start in range(0, len(order), size)]


def _trimmed(joined: dict[str, torch.Tensor], rows: torch.Tensor) -> dict[str, Any]:
    first = int(joined["prompt_mask"][rows].any(0).int().argmax())
    width = joined["completion_mask"].shape[1]
    last = int(joined["completion_mask"][rows].sum(1).max())
    found: dict[str, Any] = {}
    for key, value in joined.items():
        if not value.dim():
            found[key] = value
        elif key.startswith("prompt_"):
            found[key] = value[rows, first:]
        else:
            found[key] = value[rows, :last] if value.dim() == 2 and value.shape[1] == width else value[rows]
    return found


class SortedGRPOTrainer(SortingBatches, GRPOTrainer):
    """Stock, sorted."""


class ScoringSortedGRPOTrainer(ScoresOld, SortingBatches, GRPOTrainer):
    """Stock, sorted, with old log-probs."""
