"""The planner: from a rollout tree and limits to a schedule of forwards and backwards (NumPy only)."""

from harts_hf.planner.chunks import CHUNK_SIZE, ChunkTree, build_chunk_tree
from harts_hf.planner.config import PlannerConfig
from harts_hf.planner.linear_calls import ChainDecomposition, decompose_chains, min_linear_calls
from harts_hf.planner.microbatch import Microbatch
from harts_hf.planner.schedule import Schedule
from harts_hf.planner.windows import plan_window

__all__ = [
    "CHUNK_SIZE",
    "ChainDecomposition",
    "ChunkTree",
    "Microbatch",
    "PlannerConfig",
    "Schedule",
    "build_chunk_tree",
    "decompose_chains",
    "min_linear_calls",
    "plan_window",
]
