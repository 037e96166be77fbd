"""Is it the same training: draws of rollouts, several ways of computing them, a verdict and its report."""

from harts_hf.verify.verification import planner_of_parts, verify

__all__ = ["planner_of_parts", "verify"]
