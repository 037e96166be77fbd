"""Whether tree training computes what training without sharing does, on a given model and given trajectories.

Rounding makes any two ways of computing a model differ, so every figure of the tree stands beside the same figure of
the expanded computation (the unpatched model, one trajectory at a time), and beside what running that again, or in
padded batches in another order, changes.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import nn

from harts_hf.modeling import has_routers, patch, unpatch
from harts_hf.planner import PlannerConfig
from harts_hf.tree import IntArray, RolloutTree
from harts_hf.verify.figures import Verdict
from harts_hf.verify.kinds import parameter_kinds
from harts_hf.verify.layers import LayeredOracle
from harts_hf.verify.oracle import build_oracle
from harts_hf.verify.verdict import GradientErrors, LogProbs, judge
from harts_hf.verify.ways import (
    AGAIN,
    BATCHED,
    EXPANDED,
    ORACLE,
    PARTS,
    ROUNDED,
    TREE,
    Gradients,
    Measured,
    Way,
    measure_expanded,
    measure_oracle,
    measure_rounded,
    measure_tree,
)

# Trees of a training are larger than a draw: in so many parts, its microbatches hand over states as theirs do.
NUM_PARTS = 3
# The effect of roundings is averaged over so many expanded tokens, in at least and at most so many runs of each draw:
# few tokens make few roundings, and their sum is as large or small as luck will have it.
ROUNDED_TOKENS, ROUNDED_RUNS = 64, (2, 16)
Progress = Callable[[int, Way], None]


def verify(
    model: nn.Module,
    draws: Sequence[Sequence[IntArray | Sequence[int]]],
    *,
    planner: PlannerConfig | None = None,
    with_oracle: bool = True,
    seed: int = 0,
    router_loss: float = 0.0,
    progress: Progress = lambda draw, way: None,
) -> Verdict:
    """Computes log-probs and gradients of every draw in several ways and compares them.

    The gradients are those of the sum of all log-probs, each with a normal random weight of its own, so a token that
    several trajectories share has several weights.

    Where the tree is farther from the reference than the expanded computation's own error allows, that error may be
    small by luck or by nature (a gradient that is zero in theory). Then the expanded computation also runs with
    :class:`~harts_hf.verify.roundings.RandomRoundings`, and what they change is nobody's error.

    Args:
        model: a causal language model of a supported family in float32 or bfloat16; it is left unpatched.
        draws: trajectories of each draw, ``[L]`` token ids (arrays or lists), at least two each. Errors scatter
            from draw to draw, so one draw judges by the widest limits only. Draws of the same trajectories differ in
            their weights, but round alike, and count as one.
        planner: how the tree is run; sharing always if None. It is run once more as :func:`planner_of_parts` says.
        with_oracle: whether to compare with float64: a copy of the model, or where that does not fit, layer by layer.
        seed: of the weights.
        router_loss: coefficient of the router's auxiliary loss over all trajectories of a draw, which is added to what
            gradients are of.
        progress: called with the index of the draw and the way before each is computed.

    Raises:
        UnsupportedModelError: a model that tree training does not support.
        ValueError: a router's loss of a model without routers, no draws, or a draw without trajectories or with one of
            fewer than two tokens; NaN or infinity in the model, or in what it computes unpatched.
    """
    arrays = [[np.asarray(tokens, dtype=np.int64) for tokens in draw] for draw in draws]
    _check_draws(arrays)
    unpatch(patch(model))  # refuses what is not supported before anything is computed
    if router_loss and not has_routers(model):
        raise ValueError(f"expected a mixture of experts with router_loss={router_loss}, got {type(model).__name__}")
    _check_finite("parameters and buffers", {**dict(model.named_parameters()), **dict(model.named_buffers())})
    planner = planner or PlannerConfig(sharing="always")
    oracle = build_oracle(model) if with_oracle else None
    indices = _indices(arrays)
    log_probs = LogProbs()
    gradients = {name: GradientErrors(kind=kind) for name, kind in parameter_kinds(model).items()}
    for number, trajectories in enumerate(arrays):
        weights = _weights(trajectories, seed + number)
        ways = _measure(model, oracle, trajectories, weights, planner, router_loss, partial(progress, number))
        _add_draw(log_probs, gradients, ways, indices[number])

    def verdict() -> Verdict:
        return judge(
            log_probs,
            {name: one for name, one in gradients.items() if one.squares},  # those that are trained
            epsilon=torch.finfo(next(model.parameters()).dtype).eps,
            num_layers=len(model.config.layer_types),  # type: ignore[union-attr, arg-type]
        )

    first = verdict()
    if first.passed:
        return first
    few, many = ROUNDED_RUNS
    runs = min(many, max(few, ROUNDED_TOKENS // sum(len(tokens) for draw in arrays for tokens in draw)))
    for number, trajectories in enumerate(arrays):
        progress(number, ROUNDED)
        weights = _weights(trajectories, seed + number)
        exact = measure_expanded(model, trajectories, weights, router_loss=router_loss)
        for run in range(number * runs, (number + 1) * runs):
            progress(number, ROUNDED)
            moved = measure_rounded(model, trajectories, weights, seed=run, router_loss=router_loss)
            change = (moved.log_probs - exact.log_probs).square().mean().item()
            _add(log_probs.changes, indices[number], _finite(change) / runs / indices.count(indices[number]))
            for name, gradient in exact.gradients.items():
                change = _square(moved.gradients[name].double() - gradient.double())
                _add(gradients[name].changes, indices[number], _finite(change) / runs)
    return verdict()


def planner_of_parts(trajectories: Sequence[IntArray], planner: PlannerConfig) -> PlannerConfig:
    """The planner with microbatches of a third of the unique tokens, if that is less; at least of one chunk."""
    unique = RolloutTree.from_trajectories(trajectories).num_tokens
    budget = max(planner.chunk_size, -(-unique // NUM_PARTS))
    return replace(planner, max_tokens_per_microbatch=min(planner.max_tokens_per_microbatch, budget))


def _check_draws(draws: Sequence[Sequence[IntArray]]) -> None:
    if not draws:
        raise ValueError("expected at least one draw of trajectories, got none")
    for number, trajectories in enumerate(draws):
        shortest = min(map(len, trajectories), default=0)
        if shortest < 2:
            raise ValueError(f"expected trajectories of at least two tokens, got one of {shortest} in draw {number}")


def _check_finite(what: str, tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"expected {what} of the unpatched model to be finite, got NaN or infinity in {name}")


def _indices(draws: Sequence[Sequence[IntArray]]) -> list[int]:
    """For each draw the index of what it counts as: that of an earlier draw of the same trajectories, or a new one."""
    known: dict[bytes, int] = {}
    return [known.setdefault(b"|".join(tokens.tobytes() for tokens in draw), len(known)) for draw in draws]


def _add_draw(
    log_probs: LogProbs,
    gradients: Mapping[str, GradientErrors],
    ways: Iterator[tuple[Way, Measured, Gradients]],
    index: int,
) -> None:
    """Adds what every way gives as it comes: gradients of a whole model are large, and no two ways' are kept."""
    for way, one, reference in ways:
        values = log_probs.values.setdefault(way, [])
        if index == len(values):
            values.append(one.log_probs.cpu())
        for name, exact in reference.items():
            gradient = gradients[name]
            if way == EXPANDED:
                _add(gradient.squares, index, _square(exact))
            if way != ORACLE:
                error = one.gradients[name].double() - exact
                _add(gradient.errors.setdefault(way, []), index, _square(error))
        del one  # before the next way is computed


def _square(values: torch.Tensor) -> float:
    return values.double().square().sum().item()


def _finite(change: float) -> float:
    """A run that overflows excuses nothing."""
    return change if math.isfinite(change) else 0.0


def _add(sums: list[float], index: int, value: float) -> None:
    """Adds to the sum at ``index``, which may be the next new one."""
    if index == len(sums):
        sums.append(value)
    else:
        sums[index] += value


def _measure(
    model: nn.Module,
    oracle: nn.Module | LayeredOracle | None,
    trajectories: Sequence[IntArray],
    weights: Sequence[torch.Tensor],
    planner: PlannerConfig,
    router_loss: float,
    progress: Callable[[Way], None],
) -> Iterator[tuple[Way, Measured, Gradients]]:
    """Every way with the gradients that its own are compared with, the expanded computation first."""
    progress(EXPANDED)
    expanded = measure_expanded(model, trajectories, weights, router_loss=router_loss)
    _check_finite("results", {"the log-probs": expanded.log_probs, **expanded.gradients})
    reference = expanded.gradients
    if oracle is not None:
        progress(ORACLE)
        exact = measure_oracle(oracle, trajectories, weights, router_loss=router_loss)
        reference = exact.gradients
        yield ORACLE, exact, reference
        del exact
    yield EXPANDED, expanded, reference
    del expanded
    batched: tuple[tuple[Way, int], ...] = ((AGAIN, 1), (BATCHED, 2))
    for way, size in batched:
        progress(way)
        yield (
            way,
            measure_expanded(model, trajectories, weights, batch_size=size, router_loss=router_loss),
            reference,
        )
    tree: tuple[tuple[Way, PlannerConfig], ...] = ((TREE, planner), (PARTS, planner_of_parts(trajectories, planner)))
    for way, config in tree:
        progress(way)
        yield way, measure_tree(model, trajectories, weights, config, router_loss=router_loss), reference


def _weights(trajectories: Sequence[IntArray], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(len(tokens) - 1, generator=generator) for tokens in trajectories]
