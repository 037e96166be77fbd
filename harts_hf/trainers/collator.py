"""The data collator: trajectories in, a planned window out."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harts_hf.errors import HartsWarning
from harts_hf.planner import LimitError, PlannerConfig
from harts_hf.planner.config import ExecutionChoice
from harts_hf.runtime import TreeWindow


@dataclass(kw_only=True)
class TreeDataCollator:
    """Merges trajectories into a tree, plans it and returns its microbatches; usable as a ``collate_fn``.

    Attributes:
        planner: limits of the plan.
        vocab_size: if given, token ids are checked against it.
    """

    planner: PlannerConfig = field(default_factory=PlannerConfig)
    vocab_size: int | None = None

    def __call__(self, features: Sequence[Any]) -> TreeWindow:
        """Plans one window.

        Limits of memory that no schedule of these trajectories can meet are raised to the smallest that work, with a
        :class:`HartsWarning`: the longest trajectory to come is not known when a training starts, and should not end
        it.

        Args:
            features: trajectories: 1-D integer arrays, or mappings with ``input_ids`` and optionally
                ``attention_mask`` (padding is dropped), each 1-D.

        Raises:
            ValueError: no trajectory, an empty one, a mask of another length, token ids outside the vocabulary.
        """
        trajectories = [_real_tokens(feature, index) for index, feature in enumerate(features)]
        try:
            return TreeWindow(trajectories, self.planner, vocab_size=self.vocab_size)
        except LimitError as error:
            warnings.warn(f"{error}; this window runs with that", HartsWarning, stacklevel=2)
            raised: Any = error.needed
            return TreeWindow(trajectories, replace(self.planner, **raised), vocab_size=self.vocab_size)

    def for_execution(self, execution: ExecutionChoice, *, can_skip_scoring: bool) -> "TreeDataCollator":
        """The collator with an execution of the planner chosen.

        "auto" is "nested" where the scoring pass can be left out, with at most ``max_graph_tokens`` rows of graphs
        alive (twice a microbatch if there is no such limit), and "replay" elsewhere.
        """
        limits: dict[str, Any] = {}
        if execution == "auto":
            execution = "nested" if can_skip_scoring else "replay"
            if execution == "nested" and self.planner.max_graph_tokens is None:
                limits["max_graph_tokens"] = 2 * self.planner.max_tokens_per_microbatch
        return replace(self, planner=replace(self.planner, execution=execution, **limits))


def _real_tokens(feature: Any, index: int) -> NDArray[Any]:
    if not isinstance(feature, Mapping):
        return np.asarray(feature)
    tokens = np.asarray(feature["input_ids"])
    mask = feature.get("attention_mask")
    if mask is None:
        return tokens
    mask = np.asarray(mask)
    if mask.shape != tokens.shape:
        raise ValueError(
            f"expected attention_mask of trajectory {index} to have shape {tokens.shape}, got {mask.shape}"
        )
    return tokens[mask != 0]
