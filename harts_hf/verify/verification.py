"""Whether tree training computes what training without sharing does, on a given model and given trajectories.

Rounding makes any two ways of computing a model differ, so every figure of the tree stands beside the same figure of
the expanded computation (the unpatched model, one trajectory at a time), and beside what running that again, or in
padded batches in another order, changes.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from harts_hf.modeling import patch, unpatch
from harts_hf.planner import PlannerConfig
from harts_hf.tree import IntArray, RolloutTree
from harts_hf.verify.kinds import parameter_kinds
from harts_hf.verify.measuring import Measured, build_oracle, measure_expanded, measure_oracle, measure_tree
from harts_hf.verify.verdict import AGAIN, BATCHED, EXPANDED, ORACLE, PARTS, TREE, SquaredErrors, Verdict, judge

# Trees of a training are larger than a draw: in so many parts, its microbatches hand over states as theirs do.
NUM_PARTS = 3


def verify(
    model: nn.Module,
    draws: Sequence[Sequence[IntArray]],
    *,
    planner: PlannerConfig | None = None,
    with_oracle: bool = True,
    seed: int = 0,
    progress: Callable[[str], None] = lambda step: None,
) -> Verdict:
    """Computes log-probs and gradients of every draw in several ways and compares them.

    The gradients are those of the sum of all log-probs, each with a normal random weight of its own, so a token that
    several trajectories share has several weights.

    Args:
        model: a causal language model of a supported family in float32 or bfloat16; it is left unpatched.
        draws: trajectories of each draw, ``[L]`` token ids, at least two each. Errors scatter from draw to draw, so
            one draw judges by the widest limits only. Draws of the same trajectories differ in their weights, but
            round alike, and count as one.
        planner: how the tree is run; sharing always if None. It is run once more as :func:`planner_of_parts` says.
        with_oracle: whether to compare with float64 (where it fits into memory).
        seed: of the weights.
        progress: called with the name of each step before it is taken.

    Raises:
        UnsupportedModelError: a model that tree training does not support.
        ValueError: no draws.
    """
    if not draws:
        raise ValueError("expected at least one draw of trajectories, got none")
    unpatch(patch(model))  # refuses what is not supported before anything is computed
    planner = planner or PlannerConfig(sharing="always")
    kinds = parameter_kinds(model)
    oracle = build_oracle(model) if with_oracle else None
    log_probs: dict[str, list[torch.Tensor]] = {}
    squared_errors: SquaredErrors = {}
    squares: dict[str, list[float]] = {}
    places: dict[bytes, int] = {}
    for number, trajectories in enumerate(draws):
        place = places.setdefault(b"|".join(tokens.tobytes() for tokens in trajectories), len(places))
        ways = _measure(model, oracle, trajectories, _weights(trajectories, seed + number), planner, progress)
        for way, measured in ways.items():
            if place == len(log_probs.setdefault(way, [])):
                log_probs[way].append(measured.log_probs.cpu())
        reference = ways.pop(ORACLE, ways[EXPANDED]).gradients
        for name, exact in reference.items():
            _add(squares.setdefault(name, []), place, exact)
            for way, measured in ways.items():
                error = measured.gradients[name].double() - exact
                _add(squared_errors.setdefault(name, {}).setdefault(way, []), place, error)
    return judge(
        log_probs,
        squared_errors,
        squares,
        kinds,
        epsilon=torch.finfo(next(model.parameters()).dtype).eps,
        num_layers=len(model.config.layer_types),  # type: ignore[union-attr, arg-type]
    )


def planner_of_parts(trajectories: Sequence[IntArray], planner: PlannerConfig) -> PlannerConfig:
    """The planner with microbatches of a third of the unique tokens, if that is less; at least of one chunk."""
    unique = RolloutTree.from_trajectories(trajectories).num_tokens
    budget = max(planner.chunk_size, -(-unique // NUM_PARTS))
    return replace(planner, max_tokens_per_microbatch=min(planner.max_tokens_per_microbatch, budget))


def _add(sums: list[float], place: int, values: torch.Tensor) -> None:
    """Adds the sum of squares to the sum at ``place``, which may be the next new one."""
    square = values.double().square().sum().item()
    if place == len(sums):
        sums.append(square)
    else:
        sums[place] += square


def _measure(
    model: nn.Module,
    oracle: nn.Module | None,
    trajectories: Sequence[IntArray],
    weights: Sequence[torch.Tensor],
    planner: PlannerConfig,
    progress: Callable[[str], None],
) -> dict[str, Measured]:
    ways = {}
    for way, batch_size in ((EXPANDED, 1), (AGAIN, 1), (BATCHED, 2)):
        progress(way)
        ways[way] = measure_expanded(model, trajectories, weights, batch_size=batch_size)
    for way, config in ((TREE, planner), (PARTS, planner_of_parts(trajectories, planner))):
        progress(way)
        ways[way] = measure_tree(model, trajectories, weights, config)
    if oracle is not None:
        progress(ORACLE)
        ways[ORACLE] = measure_oracle(oracle, trajectories, weights)
    return ways


def _weights(trajectories: Sequence[IntArray], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(len(tokens) - 1, generator=generator) for tokens in trajectories]
