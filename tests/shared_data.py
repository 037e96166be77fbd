"""Real rollouts (see CONTRIBUTING): found by HARTS_DATA, else in ../shared/data beside the project."""

import gzip
import json
import os
from functools import cache
from pathlib import Path

import pytest

from harts_hf.tree import RolloutTree

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


def data_folder() -> Path:
    """The folder of real rollouts; without it the test fails under CI and is skipped elsewhere."""
    root = Path(__file__).resolve().parents[1]
    folder = Path(os.environ.get("HARTS_DATA") or root.parent / "shared" / "data")
    if not folder.is_dir():
        message = f"no shared data in {folder}: set HARTS_DATA"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    return folder


@cache
def shape_trees(name: str) -> tuple[RolloutTree, ...]:
    """The trees of one shape file, a group each."""
    with gzip.open(data_folder() / "shapes" / f"{name}.jsonl.gz", "rt") as lines:
        groups = [json.loads(line) for line in lines]
    return tuple(RolloutTree.from_shape(group["parent"], group["length"], group["sample_node"]) for group in groups)
