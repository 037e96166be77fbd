"""Is it the same training: draws of rollouts, several ways of computing them, a verdict and its report."""

from harts_hf.verify.comparison import planner_of_parts, verify
from harts_hf.verify.draws import Draw, draw_trajectories
from harts_hf.verify.figures import Verdict
from harts_hf.verify.report import format_verdict

__all__ = ["Draw", "Verdict", "draw_trajectories", "format_verdict", "planner_of_parts", "verify"]
