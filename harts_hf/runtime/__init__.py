"""Runs planned windows on a patched model."""

from harts_hf.runtime.functional import tree_logprobs, window_logprobs
from harts_hf.runtime.guard import ModelChangedError
from harts_hf.runtime.run import Coefficients, HeadOptions, Scores, WindowRun
from harts_hf.runtime.window import TreeWindow

__all__ = [
    "Coefficients",
    "HeadOptions",
    "ModelChangedError",
    "Scores",
    "TreeWindow",
    "WindowRun",
    "tree_logprobs",
    "window_logprobs",
]
