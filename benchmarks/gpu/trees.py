"""The trees that the GPU benchmarks run on: TRL's layouts and the shapes of real rollouts."""

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from harts_hf.batch import AttentionIntervals, ConvTable, GatherIndex, LinearTables
from harts_hf.planner.chunks import CHUNK_SIZE, build_chunk_tree
from harts_hf.tree import IntArray, RolloutTree

FRACTIONS = {"0": 0.0, "1/4": 0.25, "3/4": 0.75, "15/16": 0.9375}


@dataclass(frozen=True, eq=False)
class Forest:
    """Compact rows of several trees, one after another, and the rows of every trajectory."""

    parent: IntArray
    depth: IntArray
    subtree_end: IntArray
    paths: list[IntArray]

    @property
    def num_rows(self) -> int:
        return len(self.parent)

    @property
    def lengths(self) -> IntArray:
        return np.array([len(path) for path in self.paths], np.int64)

    @property
    def ratio(self) -> float:
        """Expanded tokens / unique tokens."""
        return float(self.lengths.sum() / self.num_rows)

    @property
    def expanded_rows(self) -> IntArray:
        """Compact row of every expanded token, trajectory after trajectory."""
        return np.concatenate(self.paths)

    def linear_tables(self) -> LinearTables:
        return LinearTables.build(build_chunk_tree(self.parent, self.depth), np.arange(self.num_rows))

    def conv_table(self, width: int) -> ConvTable:
        columns = [np.arange(self.num_rows)]
        for _ in range(width - 1):
            columns.append(np.append(self.parent, -1)[columns[-1]])
        index = np.stack(columns[::-1], axis=1).ravel()
        return ConvTable(gather=GatherIndex.build(index, self.num_rows), width=width)

    def intervals(self) -> AttentionIntervals:
        return AttentionIntervals(
            lo=torch.arange(self.num_rows, dtype=torch.int32), hi=torch.from_numpy(self.subtree_end.astype(np.int32))
        )

    @property
    def expanded_chunks(self) -> int:
        """Chunks that the trajectories have alone."""
        return int((-(-self.lengths // CHUNK_SIZE)).sum())

    @property
    def pairs(self) -> tuple[int, int]:
        """Visible (query, key) pairs, expanded and compact."""
        lengths = self.lengths
        return int((lengths * (lengths + 1) // 2).sum()), int((self.subtree_end - np.arange(self.num_rows)).sum())


def join(trees: list[RolloutTree]) -> Forest:
    """Several trees as one forest."""
    parent, depth, end, paths, offset = [], [], [], [], 0
    for tree in trees:
        parent.append(np.where(tree.parent >= 0, tree.parent + offset, -1))
        depth.append(tree.depth)
        end.append(tree.subtree_end + offset)
        paths += [np.asarray(tree.path(i)) + offset for i in range(tree.num_trajectories)]
        offset += tree.num_tokens
    return Forest(np.concatenate(parent), np.concatenate(depth), np.concatenate(end), paths)


def prompt_layout(length: int, fraction: float) -> Forest:
    """Four rollouts of ``length``; a prefix of ``fraction`` of it is shared by all."""
    prefix = round(length * fraction)
    if prefix == 0:
        return join([RolloutTree.from_shape([-1], [length], [0]) for _ in range(4)])
    return join([RolloutTree.from_shape([-1, 0, 0, 0, 0], [prefix] + [length - prefix] * 4, [1, 2, 3, 4])])


def nested_layout(length: int, fraction: float) -> Forest:
    """A prefix, two middles and four leaves; middles and leaves share what the prefix leaves in halves."""
    prefix = round(length * fraction)
    half = (length - prefix) // 2
    if prefix == 0:
        return join([RolloutTree.from_shape([-1, 0, 0], [half] * 3, [1, 2]) for _ in range(2)])
    return join([RolloutTree.from_shape([-1, 0, 0, 1, 1, 2, 2], [prefix] + [half] * 6, [3, 4, 5, 6])])


def fork_layout(prefix: int, branches: int, length: int) -> Forest:
    """A prefix shared by equal branches."""
    parent = [-1] + [0] * branches
    return join([RolloutTree.from_shape(parent, [prefix] + [length] * branches, list(range(1, branches + 1)))])


def shape_forest(folder: Path, name: str, min_rows: int, max_groups: int = 100) -> Forest:
    """The first groups of a shape file that together have ``min_rows`` unique tokens."""
    trees: list[RolloutTree] = []
    with gzip.open(folder / f"{name}.jsonl.gz", "rt") as lines:
        for line in lines:
            group = json.loads(line)
            trees.append(RolloutTree.from_shape(group["parent"], group["length"], group["sample_node"]))
            if sum(tree.num_tokens for tree in trees) >= min_rows or len(trees) == max_groups:
                break
    return join(trees)


def layouts(lengths: tuple[int, ...] = (16384, 32768, 65536)) -> dict[str, Forest]:
    """TRL's layouts by name: prompt-16K-1/4, nested-64K-15/16, ..."""
    result = {}
    for length in lengths:
        for name, fraction in FRACTIONS.items():
            result[f"prompt-{length // 1024}K-{name}"] = prompt_layout(length, fraction)
        for name, fraction in FRACTIONS.items():
            if fraction:
                result[f"nested-{length // 1024}K-{name}"] = nested_layout(length, fraction)
    return result
