"""From trajectories to a planned window, by a training's settings."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from numpy.typing import ArrayLike

from harts_hf.errors import HartsWarning
from harts_hf.planner import LimitError, PlannerConfig, with_execution_chosen
from harts_hf.runtime.window import TreeWindow
from harts_hf.tree import RolloutTree


@dataclass(frozen=True, kw_only=True)
class WindowPlanner:
    """Plans windows.

    Attributes:
        config: limits of the plans.
        vocab_size: if given, token ids are checked against it.
    """

    config: PlannerConfig = field(default_factory=PlannerConfig)
    vocab_size: int | None = None

    def __call__(self, trajectories: Sequence[ArrayLike] | RolloutTree, *, rank: int | None = None) -> TreeWindow:
        """Plans one window; ``rank`` says which rank's microbatches of a plan for several run here.

        Limits of memory that no schedule of these trajectories can meet are raised to the smallest that work, with a
        :class:`HartsWarning`: the longest trajectory to come is not known when a training starts, and should not end
        it.

        Raises:
            ValueError: no trajectory, an empty one, or token ids outside the vocabulary.
        """
        try:
            return TreeWindow(trajectories, self.config, vocab_size=self.vocab_size, rank=rank)
        except LimitError as error:
            warnings.warn(f"{error}; this window runs with that", HartsWarning, stacklevel=2)
            raised: Any = error.needed
            config = replace(self.config, **raised)
            return TreeWindow(trajectories, config, vocab_size=self.vocab_size, rank=rank)

    def with_execution_chosen(self, *, can_skip_scoring: bool, num_rows: int) -> "WindowPlanner":
        """The planner with another execution than "auto": see :func:`harts_hf.planner.with_execution_chosen`."""
        config = with_execution_chosen(self.config, can_skip_scoring=can_skip_scoring, num_rows=num_rows)
        return replace(self, config=config)
