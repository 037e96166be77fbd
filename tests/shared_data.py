"""Shapes of real rollouts: the files of examples/shapes, described in its README."""

import gzip
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from harts_hf.tree import RolloutTree

SHAPES = Path(__file__).resolve().parents[1] / "examples" / "shapes"
SHAPE_NAMES = (
    "tau_airline_a",
    "tau_airline_b",
    "anyswe_a",
    "anyswe_b",
    "nemo_qwen3think_b_drop",
    "miniswe_b_drop",
    "miniswe_b_keep",
    "tot_game24",
    "lats_webshop",
    "vmcts_dafny_bst",
)


def shape_file(name: str) -> Path:
    """The shape file of a set."""
    return SHAPES / f"{name}.jsonl.gz"


@cache
def shape_trees(name: str) -> tuple[RolloutTree, ...]:
    """The trees of one shape file, one per group."""
    with gzip.open(shape_file(name), "rt") as lines:
        groups = [json.loads(line) for line in lines]
    return tuple(RolloutTree.from_shape(group["parent"], group["length"], group["sample_node"]) for group in groups)


def below_one_root(trees: Sequence[RolloutTree], rows: int) -> RolloutTree:
    """The trees as subtrees of one root of ``rows`` rows: what a common system prompt makes of them."""
    parent, length, ends = [-1], [rows], []
    for tree in trees:
        shape, first = tree.to_shape(), len(parent)
        parent += [0 if above < 0 else above + first for above in shape["parent"]]
        length += shape["length"]
        ends += [end + first for end in shape["sample_node"]]
    return RolloutTree.from_shape(parent, length, ends)
