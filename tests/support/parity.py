"""Log-probs of a tree against the unpatched model, one trajectory at a time, in float64.

Budget: the stock model differs from itself (a prefix alone against inside a longer sequence) by 2e-14 in log-probs and
gradients in this setting, so 1e-10 and 1e-9 leave four orders for sums in another order and none for a mistake.
"""

import hashlib
from typing import Any

import numpy as np
import torch
from torch import nn

from harts_hf import PlannerConfig, Schedule, patch, unpatch
from harts_hf.runtime import RunOptions, TreeValues, TreeWindow, WindowRun, window_logprobs
from support.oracle import (
    assert_gradients_close,
    float64_everywhere,
    gradients,
    random_weights,
    trajectory_values,
)

LOG_PROB_TOLERANCE = 1e-10
GRADIENT_TOLERANCE = 1e-9


# What the stock model gives: tests differ in how the tree is cut, of which it knows nothing.
_EXPECTED: dict[str, tuple[list[torch.Tensor], list[torch.Tensor], dict[str, torch.Tensor]]] = {}


def expected_of(
    model: nn.Module,
    trajectories: list[np.ndarray],
    weights: list[torch.Tensor],
    entropy_weights: list[torch.Tensor],
    temperature: float,
) -> tuple[list[torch.Tensor], list[torch.Tensor], dict[str, torch.Tensor]]:
    """Log-probs, entropies and gradients of the stock model; computed once for equal weights and trajectories."""
    digest = hashlib.sha256(f"{model.config.to_json_string()} {temperature}".encode())
    for values in (*model.state_dict().values(), *weights, *entropy_weights):
        digest.update(values.numpy())
    for row in trajectories:
        digest.update(f"{row.tolist()}".encode())
    if (key := digest.hexdigest()) in _EXPECTED:
        return _EXPECTED[key]
    model.zero_grad()
    log_probs, entropies = [], []
    for row, weight, entropy_weight in zip(trajectories, weights, entropy_weights, strict=True):
        log_prob, entropy = trajectory_values(model, row, temperature)
        ((log_prob * weight).sum() + (entropy * entropy_weight).sum()).backward()
        log_probs.append(log_prob.detach())
        entropies.append(entropy.detach())
    _EXPECTED[key] = log_probs, entropies, gradients(model)
    return _EXPECTED[key]


def assert_values_close(name: str, values: list[torch.Tensor], references: list[torch.Tensor]) -> None:
    """Every float64 value of every trajectory within the tolerance."""
    for index, (value, reference) in enumerate(zip(values, references, strict=True)):
        assert value.dtype == torch.float64 and value.shape == reference.shape
        difference = (value - reference).abs().max().item() if len(reference) else 0.0
        assert difference < LOG_PROB_TOLERANCE, f"{name} of trajectory {index} differ by {difference:.1e}"


def check_parity(
    model: nn.Module,
    trajectories: list[np.ndarray],
    planner: PlannerConfig | None = None,
    temperature: float = 1.0,
    *,
    schedule: Schedule | None = None,
) -> None:
    """Log-probs, entropies and every gradient of the tree, planned or as scheduled, against the stock model's."""
    window = TreeWindow.from_schedule(trajectories, schedule) if schedule else TreeWindow(trajectories, planner)
    weights = random_weights(trajectories, torch.float64, seed=1)
    entropy_weights = random_weights(trajectories, torch.float64, seed=2)
    with float64_everywhere(model):
        expected = expected_of(model, trajectories, weights, entropy_weights, temperature)
        model.zero_grad()
        log_probs, entropies = window_logprobs(model, window, temperature, return_entropy=True)
        pairs = [*zip(log_probs, weights, strict=True), *zip(entropies, entropy_weights, strict=True)]
        sum((value * weight).sum() for value, weight in pairs).backward()
        got = gradients(model)
        unpatch(model)
    assert_values_close("log-probs", log_probs, expected[0])
    assert_values_close("entropies", entropies, expected[1])
    assert_gradients_close(got, expected[2], GRADIENT_TOLERANCE)


def check_run_parity(model: nn.Module, trajectories: list[np.ndarray], planner: PlannerConfig, **options: Any) -> None:
    """The same of a :class:`WindowRun` with options of its own: scores, then the backward of weighted log-probs."""
    window = TreeWindow(trajectories, planner)
    weights = random_weights(trajectories, torch.float64, seed=1)
    nothing = [torch.zeros_like(weight) for weight in weights]
    by_row = torch.zeros(window.tree.num_tokens, dtype=torch.float64)
    for index, weight in enumerate(weights):
        by_row[window.label_rows(index)] += weight
    with float64_everywhere(model):
        expected = expected_of(model, trajectories, weights, nothing, 1.0)
        model.zero_grad()
        run = WindowRun(patch(model), window, RunOptions(**options))
        log_probs = run.score().rows["log_prob"]
        run.backward(TreeValues(rows={"log_prob": by_row}), torch.Tensor.backward)
        got = gradients(model)
        unpatch(model)
    values = [log_probs[window.label_rows(index)] for index in range(len(trajectories))]
    assert_values_close("log-probs", values, expected[0])
    assert_gradients_close(got, expected[2], GRADIENT_TOLERANCE)
