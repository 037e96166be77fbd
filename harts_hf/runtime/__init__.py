"""Runs planned windows on a patched model."""

from harts_hf.runtime.functional import tree_logprobs
from harts_hf.runtime.passes import HeadOptions, Scores, run_backward, score
from harts_hf.runtime.window import TreeWindow

__all__ = ["HeadOptions", "Scores", "TreeWindow", "run_backward", "score", "tree_logprobs"]
