"""Patched Hugging Face models."""

from harts_hf.modeling.families import FAMILIES
from harts_hf.modeling.forwards import TreeAnswer
from harts_hf.modeling.outputs import (
    ENTROPY,
    HEAD_VALUES,
    IS_TOP1,
    LABEL_VALUES,
    LOG_PROB,
    ROUTER_CHOICES,
    ROUTER_PROBABILITIES,
    WITHOUT_GRADIENT,
    RowValue,
    Sum,
)
from harts_hf.modeling.patching import add_output, is_patched, patch, unpatch, vocab_size_of
from harts_hf.modeling.routers import ROUTER_SUMS, load_balancing_loss
from harts_hf.modeling.sizes import handed_sizes, with_handed_bytes
from harts_hf.modeling.tree_pass import TreePass, Wanted

__all__ = [
    "ENTROPY",
    "FAMILIES",
    "HEAD_VALUES",
    "IS_TOP1",
    "LABEL_VALUES",
    "LOG_PROB",
    "ROUTER_CHOICES",
    "ROUTER_PROBABILITIES",
    "ROUTER_SUMS",
    "WITHOUT_GRADIENT",
    "RowValue",
    "Sum",
    "TreeAnswer",
    "TreePass",
    "Wanted",
    "add_output",
    "handed_sizes",
    "is_patched",
    "load_balancing_loss",
    "patch",
    "unpatch",
    "vocab_size_of",
    "with_handed_bytes",
]
