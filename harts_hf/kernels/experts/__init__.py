"""What routed experts run between their grouped products."""

from harts_hf.kernels.experts.api import Order, combine, expand, order_by_expert, route, weighted_swiglu

__all__ = ["Order", "combine", "expand", "order_by_expert", "route", "weighted_swiglu"]
