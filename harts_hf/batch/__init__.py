"""A planned microbatch as tensors: the only bridge from plan to tensors."""

from harts_hf.batch.handoff import HANDED_KINDS, HandedKind, Imports
from harts_hf.batch.microbatch import TreeBatch, build_batches
from harts_hf.batch.tables import (
    AttentionIntervals,
    ConvTable,
    GatherIndex,
    LabelTable,
    LinearTables,
    RowTable,
    Tables,
)

__all__ = [
    "HANDED_KINDS",
    "AttentionIntervals",
    "ConvTable",
    "GatherIndex",
    "HandedKind",
    "Imports",
    "LabelTable",
    "LinearTables",
    "RowTable",
    "Tables",
    "TreeBatch",
    "build_batches",
]
