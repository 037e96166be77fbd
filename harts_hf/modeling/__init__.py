"""Patched Hugging Face models."""

from harts_hf.modeling.families import (
    FAMILIES,
    Family,
    LinearShape,
    gated_delta_shape,
    grouped_keys,
    register_family,
)
from harts_hf.modeling.forwards import TreeAnswer
from harts_hf.modeling.outputs import (
    ENTROPY,
    EXPERT_LOAD,
    HEAD_VALUES,
    IS_TOP1,
    LABEL_VALUES,
    LOG_PROB,
    ROUTER_CHOICES,
    ROUTER_ENTROPY,
    ROUTER_PROBABILITIES,
    WITHOUT_GRADIENT,
    RowValue,
    Sum,
)
from harts_hf.modeling.patching import add_output, is_patched, patch, unpatch, vocab_size_of
from harts_hf.modeling.routers import LOAD_SUMS, ROUTER_SUMS, has_routers, load_balancing_loss
from harts_hf.modeling.routing import find_routers
from harts_hf.modeling.sizes import handed_sizes, with_handed_bytes
from harts_hf.modeling.tree_pass import Routes, TreePass, Wanted

__all__ = [
    "ENTROPY",
    "EXPERT_LOAD",
    "FAMILIES",
    "HEAD_VALUES",
    "IS_TOP1",
    "LABEL_VALUES",
    "LOAD_SUMS",
    "LOG_PROB",
    "ROUTER_CHOICES",
    "ROUTER_ENTROPY",
    "ROUTER_PROBABILITIES",
    "ROUTER_SUMS",
    "WITHOUT_GRADIENT",
    "Family",
    "LinearShape",
    "Routes",
    "RowValue",
    "Sum",
    "TreeAnswer",
    "TreePass",
    "Wanted",
    "add_output",
    "find_routers",
    "gated_delta_shape",
    "grouped_keys",
    "handed_sizes",
    "has_routers",
    "is_patched",
    "load_balancing_loss",
    "patch",
    "register_family",
    "unpatch",
    "vocab_size_of",
    "with_handed_bytes",
]
