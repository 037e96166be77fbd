"""The planner's entry: trees and limits in, a schedule out (NumPy only)."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from harts_hf.forest import concatenate_trees, expand_tree
from harts_hf.planner.config import Execution, PlannerConfig, planner_config
from harts_hf.planner.cost import DEFAULT_COST, causal_pairs
from harts_hf.planner.orders import LimitError, join_needs
from harts_hf.planner.refine import best_schedule
from harts_hf.planner.schedule import Schedule
from harts_hf.tree import RolloutTree


def plan_window(trees: RolloutTree | Sequence[RolloutTree], config: PlannerConfig | None = None) -> Schedule:
    """Plans one optimizer step.

    Args:
        trees: a rollout tree, or several that make one forest (their rows and trajectories one after another; a
            prefix that two of them have in common stays apart).
        config: limits and choices; None for the defaults.

    Returns:
        The schedule. Its rows are those of ``schedule.tree``.

    Raises:
        ValueError: no tree, or something else than trees or a configuration; limits under which no schedule was found
            (the message names the smallest that works).

    Complexity, a constant number of times: O(N) NumPy work, O(S log S) Python steps for S segments, and NumPy work
    over the answer itself, which lists for every microbatch its trunks and the spans of its prefix. On several ranks
    each has a walk of its own: times ``world_size`` at most. ``max_handoff_bytes`` in "replay" adds NumPy work over
    all ops for each trunk whose states are dropped.
    """
    config = planner_config(config).plain()
    tree = trees if isinstance(trees, RolloutTree) else concatenate_trees(_only_trees(trees))
    try:
        return _plan(tree, config)
    except LimitError as error:
        raise _sufficient(tree, config, error) from None


def _only_trees(trees: Any) -> list[RolloutTree]:
    found = list(trees) if isinstance(trees, Iterable) else [trees]
    for one in found:
        if not isinstance(one, RolloutTree):
            raise ValueError(
                "expected a RolloutTree or several (RolloutTree.from_trajectories makes one), got "
                f"{type(one).__name__}"
            )
    return found


def _sufficient(tree: RolloutTree, config: PlannerConfig, error: LimitError) -> LimitError:
    """The error with limits under which there is a schedule: raising one may take another order, that needs more."""
    needed = error.needed
    while (more := _missing(tree, config, needed)) is not None:
        needed = join_needs([needed, more])
    for name in list(needed) if len(needed) > 1 else ():  # with the others raised, less may do
        others = {other: value for other, value in needed.items() if other != name}
        more = _missing(tree, config, others)
        if more is None:
            needed = others
        elif list(more) == [name]:
            needed = {**others, name: min(needed[name], more[name])}
    return LimitError(needed, config)


def _missing(tree: RolloutTree, config: PlannerConfig, limits: dict[str, int]) -> dict[str, int] | None:
    """What is still too small with some limits raised; None if a schedule keeps them."""
    try:
        _plan(tree, replace(config, **limits))  # type: ignore[arg-type]
    except LimitError as error:
        return error.needed
    return None


def _plan(tree: RolloutTree, config: PlannerConfig) -> Schedule:
    if config.sharing == "never":
        return replace(best_schedule(expand_tree(tree), config), decision="shares nothing, as asked for")
    if config.sharing == "always" or tree.num_expanded_tokens == tree.num_tokens:
        decision = "shares all prefixes, as asked for" if config.sharing == "always" else "has nothing to share"
        return replace(best_schedule(tree, config), decision=decision)
    return _shared_or_not(tree, config)


def _shared_or_not(tree: RolloutTree, config: PlannerConfig) -> Schedule:
    """The faster of a schedule that shares and one that does not; the other where only one keeps within limits."""
    try:
        shared = best_schedule(tree, config)
    except LimitError as error:
        try:
            alone = best_schedule(expand_tree(tree), config)
        except LimitError as other:
            comparable = error.needed.keys() == other.needed.keys()
            raise (min(error, other, key=lambda e: tuple(e.needed.values())) if comparable else error) from None
        return replace(alone, decision=f"does not share: with sharing {error.wish} would be needed")
    bound = no_sharing_bound(tree, config, shared.execution)
    if shared.estimated_seconds <= bound:
        seconds = f"estimated {shared.estimated_seconds:.3g} s, without sharing at least {bound:.3g} s"
        return replace(shared, decision=f"shares: {seconds}")
    try:
        alone = best_schedule(expand_tree(tree), config)
    except LimitError as error:
        return replace(shared, decision=f"shares: without sharing {error.wish} would be needed")
    times = f"estimated {shared.estimated_seconds:.3g} s with sharing, {alone.estimated_seconds:.3g} s without"
    if shared.estimated_seconds <= alone.estimated_seconds:
        return replace(shared, decision=f"shares: {times}")
    return replace(alone, decision=f"does not share: {times}")


def no_sharing_bound(tree: RolloutTree, config: PlannerConfig, execution: Execution) -> float:
    """A lower bound on the estimated seconds of any schedule that gives every trajectory of ``tree`` its own rows."""
    step = (config.cost or DEFAULT_COST).step(forwards=2 if execution == "replay" else 1)
    lengths = tree.trajectory_lengths
    rows = int(lengths.sum())
    pairs = int(causal_pairs(lengths).sum())
    microbatches = -(-rows // config.max_tokens_per_microbatch) if config.handoff else 1
    constants = (step.microbatches + step.calls) * microbatches
    return (step.seconds_of_rows(rows, pairs) + constants) / config.world_size
