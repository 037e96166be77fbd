"""Runs planned windows on a patched model."""

from harts_hf.runtime.functional import tree_logprobs, window_logprobs, window_values
from harts_hf.runtime.guard import ModelChangedError
from harts_hf.runtime.options import RunOptions
from harts_hf.runtime.planning import WindowPlanner
from harts_hf.runtime.ranks import OtherRankError, Ranks
from harts_hf.runtime.report import UpdateReport
from harts_hf.runtime.routes import KnownRoutes, TokenRoutes
from harts_hf.runtime.run import WindowRun
from harts_hf.runtime.slices import SliceRows
from harts_hf.runtime.update import TreeUpdate
from harts_hf.runtime.values import TreeValues
from harts_hf.runtime.window import TreeWindow

__all__ = [
    "KnownRoutes",
    "ModelChangedError",
    "OtherRankError",
    "Ranks",
    "RunOptions",
    "SliceRows",
    "TokenRoutes",
    "TreeUpdate",
    "TreeValues",
    "TreeWindow",
    "UpdateReport",
    "WindowPlanner",
    "WindowRun",
    "tree_logprobs",
    "window_logprobs",
    "window_values",
]
