"""Rows of a training that are longer than what its model was made for."""

import warnings
from typing import Any

from harts_hf.errors import HartsWarning
from harts_hf.modeling.positions import beyond_positions
from harts_hf.trainers.rows import PROMPTS

# By what kind of batch: the masks of a row's tokens, of TRL's GRPO and SFT.
_MASKS = ((PROMPTS[1], "completion_mask"), ("attention_mask",))


class PositionsHint:
    """Warns once, in each process, of a row beyond the model's `max_position_embeddings`.

    Args:
        trainer: with a model.
    """

    def __init__(self, trainer: Any) -> None:
        self._config = trainer.accelerator.unwrap_model(trainer.model).config
        self._is_open = True

    def note(self, batches: list[dict[str, Any]]) -> None:
        """Looks at the batches of a step; at their masks only where their columns allow such a row."""
        for batch in batches if self._is_open else ():
            masks = next(([batch[key] for key in keys] for keys in _MASKS if all(key in batch for key in keys)), [])
            if beyond_positions(self._config, sum(mask.shape[1] for mask in masks)) is None:
                continue
            longest = int(sum((mask != 0).sum(dim=1) for mask in masks).max())
            said = beyond_positions(self._config, longest, "a trained row")
            if said is not None:
                self._is_open = False
                warnings.warn(said, HartsWarning, stacklevel=2)
                return
