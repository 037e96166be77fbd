"""What a limit on handed bytes costs in the replay execution, from the planner alone (NumPy only)."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from harts_hf import PlannerConfig, RolloutTree, plan_window
from harts_hf.forest import concatenate_trees

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from shared_data import shape_trees

FACTORS = (1.0, 1.5, 2.0)
SETS = ("miniswe_b_drop", "tau_airline_b", "tot_game24")


def limits_to_try(tree: RolloutTree, config: PlannerConfig) -> Iterator[int | None]:
    """None, then multiples of the smallest limit that works, below what is alive without one."""
    free = plan_window(tree, config).peak_handoff_bytes
    yield None
    try:
        plan_window(tree, replace(config, max_handoff_bytes=0))
    except ValueError as error:
        smallest = int(str(error).rsplit("=", 1)[1])  # the message ends with it
        yield from [int(factor * smallest) for factor in FACTORS if factor * smallest < free]


def real_windows() -> list[dict[str, Any]]:
    """Whole rollout sets as windows of 16,384 rows a microbatch, with the default cost model (Ling-3.0-tiny, H200)."""
    results = []
    for name in SETS:
        tree = concatenate_trees(shape_trees(name))
        config = PlannerConfig(max_tokens_per_microbatch=16_384, sharing="always", execution="replay")
        free = plan_window(tree, config)
        for limit in limits_to_try(tree, config):
            schedule = plan_window(tree, replace(config, max_handoff_bytes=limit))
            results.append(
                {
                    "set": name,
                    "max_handoff_bytes": limit,
                    "peak_handoff_bytes": schedule.peak_handoff_bytes,
                    "microbatches": len(schedule.microbatches),
                    "forward_rows_over_unique": round(schedule.forward_tokens / tree.num_tokens, 3),
                    "estimated_seconds_over_no_limit": round(schedule.estimated_seconds / free.estimated_seconds, 3),
                }
            )
    return results
