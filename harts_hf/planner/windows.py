"""The planner's entry: trees and limits in, a schedule out (NumPy only)."""

from collections.abc import Sequence

from harts_hf.planner.config import PlannerConfig
from harts_hf.planner.forest import concatenate_trees, expand_tree
from harts_hf.planner.microbatches import cut_with_recompute
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
        ValueError: no tree.
        NotImplementedError: a setting that is not supported yet.
    """
    config = config or PlannerConfig()
    if config.handoff:
        raise NotImplementedError("states handed over between microbatches; set handoff=False")
    if config.world_size > 1:
        raise NotImplementedError("world_size above 1")
    if config.execution not in ("auto", "replay"):
        raise NotImplementedError(f"execution={config.execution!r}")
    tree = trees if isinstance(trees, RolloutTree) else concatenate_trees(list(trees))
    if config.sharing == "never":
        tree = expand_tree(tree)
    microbatches = cut_with_recompute(tree, max_rows=config.max_tokens_per_microbatch)
    oversized = tuple(m.id for m in microbatches if m.num_rows > config.max_tokens_per_microbatch)
    return Schedule(tree=tree, microbatches=tuple(microbatches), config=config, oversized=oversized)
