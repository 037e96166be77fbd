"""Windows and their runs: all that the GPU benchmarks use of the package's runtime is here."""

import numpy as np
import torch
from torch import nn

from benchmarks.gpu.registry import SEED
from harts_hf import PlannerConfig, Schedule
from harts_hf.modeling import LABEL_VALUES, LOG_PROB
from harts_hf.runtime import TreeValues, TreeWindow, WindowRun


class Window:
    """A planned window on a device, and random weights of its labels.

    Args:
        trajectories: token ids of each.
        planner: its configuration.
        device: of tables and coefficients.
    """

    def __init__(self, trajectories: list[np.ndarray], planner: PlannerConfig, device: str = "cpu") -> None:
        self._window = TreeWindow(trajectories, planner).to(device)
        self.device = device
        self.rows = [torch.from_numpy(self._window.label_rows(index)) for index in range(len(trajectories))]

    @property
    def schedule(self) -> Schedule:
        """As it was planned."""
        return self._window.schedule

    @property
    def num_microbatches(self) -> int:
        """Batches that are run."""
        return len(self._window.batches)

    def ones(self) -> torch.Tensor:
        """A weight of 1 for every row's log-prob."""
        return torch.ones(self._window.tree.num_tokens, device=self.device)

    def random_weights(self) -> torch.Tensor:
        """``[num_tokens]``: random weights of every label of every trajectory, summed by row."""
        generator = torch.Generator().manual_seed(SEED)
        per_row = torch.zeros(self._window.tree.num_tokens)
        for rows in self.rows:
            per_row.index_add_(0, rows, torch.randn(len(rows), generator=generator))
        return per_row.to(self.device)

    def run_scored(self, model: nn.Module, weights: torch.Tensor) -> None:
        """A scoring pass, then the backward of weighted log-probs."""
        run = WindowRun(model, self._window)
        run.score()
        run.backward(TreeValues(rows={LOG_PROB: weights}), torch.Tensor.backward)

    def run_unscored(self, model: nn.Module, weights: torch.Tensor) -> TreeValues:
        """Forward and backward of each microbatch, as TRL runs them, without a scoring pass before."""
        run = WindowRun(model, self._window, mode="unscored")
        wanted = dict.fromkeys(LABEL_VALUES, self.ones().bool())
        return run.backward_unscored(TreeValues(rows={LOG_PROB: weights}), wanted, torch.Tensor.backward)

    def log_probs(self, scores: TreeValues) -> torch.Tensor:
        """Of all labels, trajectory after trajectory, on the CPU."""
        log_probs = scores.rows[LOG_PROB].cpu()
        return torch.cat([log_probs[rows] for rows in self.rows])
