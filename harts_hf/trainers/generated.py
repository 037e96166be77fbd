"""What a trainer generated, as arrays: TRL makes tensors of it, and PyTorch reads a list an object at a time."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from harts_hf.rollouts.arrays import ReadArrays

# Entry of TRL's batch: [B, C], the log-probs that rollouts came with.
SAMPLING_LOG_PROBS = "sampling_per_token_logps"


class Generated:
    """Stands between TRL's ``_generate``, or a subclass's, and what TRL makes of its answer.

    Args:
        generate: the method.
        corrects: whether TRL corrects by the log-probs of the rollouts; elsewhere it makes nothing but a tensor of
            them, which :meth:`add_log_probs` does instead.
        arrays: of lists that have been read before.

    Attributes:
        prompts: ``[B]`` arrays of token ids (or lists, where they are no integers).
        completions: ``[B]`` likewise.
        completion_lists: ``[B]`` the completions as they were generated, for reward functions.
    """

    def __init__(self, generate: Callable[[list[Any]], Any], *, corrects: bool, arrays: ReadArrays) -> None:
        self._generate, self._corrects, self._arrays = generate, corrects, arrays
        self._log_probs: list[Any] | None = None
        self.prompts: list[Any] = []
        self.completions: list[Any] = []
        self.completion_lists: list[Any] = []

    def __call__(self, prompts: list[Any]) -> tuple[Any, ...]:
        """What ``generate`` answers, with arrays in place of lists of token ids and masks."""
        prompt_ids, self.completion_lists, masks, completions, log_probs, *more = self._generate(prompts)
        self.prompts, self.completions = map(self._arrays.of_rows, (prompt_ids, self.completion_lists))
        masks = None if masks is None else self._arrays.of_rows(masks)
        if not self._corrects:
            self._log_probs, log_probs = log_probs, None
        return (self.prompts, self.completions, masks, completions, log_probs, *more)

    def add_log_probs(self, batch: dict[str, Any]) -> None:
        """Adds ``sampling_per_token_logps`` as TRL has them: float32, NaN for unknown ones, 0 on padding."""
        if self._log_probs is None:
            return
        completion_ids = batch["completion_ids"]
        padded = np.zeros(completion_ids.shape, np.float32)
        for row, values in enumerate(self._log_probs):
            found = self._arrays.numbers(values)
            if found is None:
                found = np.array([math.nan if value is None else value for value in values])
            padded[row, : len(values)] = found
        batch[SAMPLING_LOG_PROBS] = torch.from_numpy(padded).to(completion_ids.device)
