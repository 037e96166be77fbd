"""Times a model's microbatches and fits the planner's cost model to them."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from harts_hf.forest import random_tokens
from harts_hf.modeling import handed_sizes, patch, vocab_size_of, with_handed_bytes
from harts_hf.planner import DEFAULT_COST, CostModel, PlannerConfig, Work, fit_unit_seconds
from harts_hf.runtime.run import WindowRun
from harts_hf.runtime.values import TreeValues
from harts_hf.runtime.window import TreeWindow
from harts_hf.tree import RolloutTree

MIN_ROWS = 256


def fit_cost_model(
    model: nn.Module,
    *,
    max_rows: int,
    source: str,
    repeats: int = 3,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> CostModel:
    """Coefficients of the forward and backward times of ``model`` on its device, and bytes of its handed states.

    Runs windows whose microbatches differ in rows, depth, replay, sequential calls and handed states, in training mode
    with random tokens and all labels scored. Gradients of the model are discarded.

    Args:
        model: of a supported family; it is patched.
        max_rows: rows of the largest microbatch, at least 256.
        source: what the cost model says about itself, such as model and device.
        repeats: times each window runs after one run that is thrown away; the fastest time of each op counts.
        seed: of the tokens.
        progress: is told about every window.

    Raises:
        ValueError: ``max_rows`` or ``repeats`` too small.
        UnsupportedModelError: a model that is not supported.
    """
    if max_rows < MIN_ROWS or repeats < 1:
        raise ValueError(
            f"expected max_rows of at least {MIN_ROWS} and repeats of at least 1, got {max_rows}, {repeats}"
        )
    patch(model)
    model.train()
    runner = _Runner(model, np.random.default_rng(seed))
    cost = with_handed_bytes(DEFAULT_COST, handed_sizes(model, next(model.parameters()).dtype))
    forwards: list[tuple[Work, float]] = []
    backwards: list[tuple[Work, float]] = []
    for name, shape, rows in _windows(max_rows):
        window = runner.window(shape, rows, cost)
        progress(f"{name}: {window.schedule.tree.num_tokens} rows in {len(window.batches)} microbatches")
        for (kind, index), seconds in runner.times(window, repeats).items():
            sample = (window.schedule.measures[index].work, seconds)
            (backwards if kind == "B" else forwards).append(sample)
    model.zero_grad(set_to_none=True)
    return replace(
        cost,
        forward=fit_unit_seconds(*zip(*forwards, strict=True)),
        backward=fit_unit_seconds(*zip(*backwards, strict=True)),
        source=source,
    )


Shape = tuple[list[int], list[int], list[int]]


def _windows(max_rows: int) -> Iterator[tuple[str, Shape, int]]:
    """Shapes of trees and the budgets to plan them with."""
    for rows in (max_rows // 4, max_rows // 2, max_rows):
        yield f"chain of {rows}", _chain(rows), rows
        short = max(1, rows // 96)
        yield f"{short} short trees", ([-1] * short, [96] * short, list(range(short))), rows
    yield "chain in four", _chain(max_rows), max_rows // 4
    yield "chain in eight", _chain(2 * max_rows), max_rows // 4
    for rows in (max_rows // 2, max_rows):
        yield f"spine of forks, {rows}", _spine(rows), rows
        yield f"bushy, {rows}", _bushy(rows), rows
    yield "spine of forks in four", _spine(max_rows), max_rows // 4
    yield "bushy in four", _bushy(max_rows), max_rows // 4


def _chain(rows: int) -> Shape:
    return [-1], [rows], [0]


def _spine(rows: int) -> Shape:
    """A spine with a fork of 24 tokens every 80: branches inside chunks, much replay."""
    forks = max(1, rows // 104)
    parent = [node for fork in range(forks) for node in (2 * fork - 2 if fork else -1, 2 * fork)]
    return parent, [80, 24] * forks, list(range(1, 2 * forks, 2))


def _bushy(rows: int) -> Shape:
    """Full binary trees of 4 levels of 64 tokens each: the most sequential calls."""
    parent: list[int] = []
    for _ in range(max(1, rows // (15 * 64))):
        first = len(parent)
        parent += [-1 if node == 0 else first + (node - 1) // 2 for node in range(15)]
    leaves = [node for node in range(len(parent)) if node not in set(parent)]
    return parent, [64] * len(parent), leaves


class _Runner:
    """Runs windows of random tokens through one model and looks at them."""

    def __init__(self, model: nn.Module, rng: np.random.Generator) -> None:
        self.model, self.rng = model, rng
        self.device = next(model.parameters()).device
        self.vocab_size: int = vocab_size_of(model)

    def window(self, shape: Shape, rows: int, cost: CostModel) -> TreeWindow:
        """A window of a shape, planned with handoff and every row computed once."""
        tree = RolloutTree.from_shape(*shape)
        tokens = random_tokens(tree, self.vocab_size, self.rng)
        planner = PlannerConfig(max_tokens_per_microbatch=rows, sharing="always", execution="replay", cost=cost)
        trajectories = [tokens[tree.path(index)] for index in range(tree.num_trajectories)]
        return TreeWindow(trajectories, planner).to(self.device)

    def times(self, window: TreeWindow, repeats: int) -> dict[tuple[str, int], float]:
        """The fastest time of every op of a window in ``repeats`` runs after a first."""
        best: dict[tuple[str, int], float] = {}
        for repeat in range(repeats + 1):
            for op, seconds in self.run(window).items():
                if repeat:
                    best[op] = min(best.get(op, np.inf), seconds)
        return best

    def run(self, window: TreeWindow) -> dict[tuple[str, int], float]:
        """Seconds of every op of one run."""
        seconds: dict[tuple[str, int], float] = {}
        timed = _Timed(self.model, seconds, self._now)

        def backward(scalar: torch.Tensor) -> None:
            start = self._now()
            scalar.backward()
            seconds["B", timed.last] = self._now() - start

        run = WindowRun(timed, window)
        scores = run.score()
        run.backward(TreeValues(rows={name: torch.ones_like(value) for name, value in scores.rows.items()}), backward)
        return seconds

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


class _Timed(nn.Module):
    """Notes how long each forward takes."""

    def __init__(self, model: nn.Module, seconds: dict[tuple[str, int], float], now: Callable[[], float]) -> None:
        super().__init__()
        self.model, self.seconds, self.now = model, seconds, now
        self.last = 0

    def forward(self, **inputs: Any) -> Any:
        self.last = inputs["harts"].batch.id
        start = self.now()
        out = self.model(**inputs)
        self.seconds["F" if torch.is_grad_enabled() else "S", self.last] = self.now() - start
        return out
