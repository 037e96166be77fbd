"""Shapes of real rollouts: the files of examples/shapes, described in its README."""

import gzip
import json
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
