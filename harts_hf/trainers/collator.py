"""The data collator: trajectories in, a planned window out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harts_hf.planner import PlannerConfig
from harts_hf.runtime import TreeWindow
from harts_hf.runtime.planning import WindowPlanner


@dataclass(kw_only=True)
class TreeDataCollator:
    """Merges trajectories into a tree, plans it and returns its microbatches; usable as a ``collate_fn``.

    Attributes:
        planner: limits of the plan; those that cannot be kept are raised, see
            :class:`harts_hf.runtime.planning.WindowPlanner`.
        vocab_size: if given, token ids are checked against it.
    """

    planner: PlannerConfig = field(default_factory=PlannerConfig)
    vocab_size: int | None = None

    def __call__(self, features: Sequence[Any]) -> TreeWindow:
        """Plans one window.

        Args:
            features: trajectories: 1-D integer arrays, or mappings with ``input_ids`` and optionally
                ``attention_mask`` (padding is dropped), each 1-D.

        Raises:
            ValueError: no trajectory, an empty one, a mask of another length, token ids outside the vocabulary.
        """
        trajectories = [_real_tokens(feature, index) for index, feature in enumerate(features)]
        return WindowPlanner(config=self.planner, vocab_size=self.vocab_size)(trajectories)


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
