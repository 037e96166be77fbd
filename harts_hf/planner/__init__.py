"""The planner: from a rollout tree and limits to a schedule of forwards and backwards (NumPy only)."""

from harts_hf.planner.choosing import executions_to_try, fastest, least_seconds, plan_step, with_execution_chosen
from harts_hf.planner.chunks import CHUNK_SIZE, ChunkTree, build_chunk_tree
from harts_hf.planner.config import PlannerConfig
from harts_hf.planner.cost import DEFAULT_COST, CostModel, Work, fit_unit_seconds
from harts_hf.planner.linear_calls import (
    ChainDecomposition,
    decompose_chains,
    min_linear_calls,
)
from harts_hf.planner.microbatch import Microbatch
from harts_hf.planner.orders import LimitError
from harts_hf.planner.plan import no_sharing_bound, plan_window
from harts_hf.planner.schedule import Schedule
from harts_hf.planner.world import WorldCounts, count_world

__all__ = [
    "CHUNK_SIZE",
    "DEFAULT_COST",
    "ChainDecomposition",
    "ChunkTree",
    "CostModel",
    "LimitError",
    "Microbatch",
    "PlannerConfig",
    "Schedule",
    "Work",
    "WorldCounts",
    "build_chunk_tree",
    "count_world",
    "decompose_chains",
    "executions_to_try",
    "fastest",
    "fit_unit_seconds",
    "least_seconds",
    "min_linear_calls",
    "no_sharing_bound",
    "plan_step",
    "plan_window",
    "with_execution_chosen",
]
