"""The trees that the GPU benchmarks run on: TRL's layouts, the shapes of real rollouts, and trees with tokens."""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu.registry import LAYOUTS, SHAPE_ROWS
from harts_hf.batch import AttentionIntervals, ConvTable, GatherIndex, LinearTables
from harts_hf.planner.chunks import CHUNK_SIZE, build_chunk_tree
from harts_hf.tree import IntArray, RolloutTree


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

    def ancestors(self, width: int) -> IntArray:
        """``[num_rows, width]``: the rows that a convolution reads, own row last; -1 before the root."""
        columns = [np.arange(self.num_rows)]
        for _ in range(width - 1):
            columns.append(np.append(self.parent, -1)[columns[-1]])
        return np.stack(columns[::-1], axis=1)

    def conv_table(self, width: int) -> ConvTable:
        return ConvTable(gather=GatherIndex.build(self.ancestors(width).ravel(), self.num_rows), width=width)

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


def batches(lengths: np.ndarray, most: int = 131072) -> list[np.ndarray]:
    """Trajectories packed in order into batches of at most ``most`` tokens (longer ones alone), for the baseline."""
    result: list[list[int]] = [[]]
    for length in lengths.tolist():
        if result[-1] and sum(result[-1]) + length > most:
            result.append([])
        result[-1].append(length)
    return [np.array(batch) for batch in result]


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


def unshared(length: int, count: int = 1) -> Forest:
    """``count`` trajectories of ``length`` that share nothing."""
    return join([RolloutTree.from_shape([-1], [length], [0])] * count)


def fork_layout(prefix: int, branches: int, length: int) -> Forest:
    """A prefix shared by equal branches."""
    parent = [-1] + [0] * branches
    return join([RolloutTree.from_shape(parent, [prefix] + [length] * branches, list(range(1, branches + 1)))])


def prompt_layout(length: int, fraction: float) -> Forest:
    """Four rollouts of ``length``; a prefix of ``fraction`` of it is shared by all."""
    prefix = round(length * fraction)
    return fork_layout(prefix, 4, length - prefix) if prefix else unshared(length, 4)


def nested_layout(length: int, fraction: float) -> Forest:
    """A prefix, two middles and four leaves; middles and leaves share what the prefix leaves in halves."""
    prefix = round(length * fraction)
    half = (length - prefix) // 2
    return join([RolloutTree.from_shape([-1, 0, 0, 1, 1, 2, 2], [prefix] + [half] * 6, [3, 4, 5, 6])])


def shape_trees(folder: Path, name: str, min_rows: int, max_groups: int | None = None) -> Iterator[RolloutTree]:
    """The first groups of a shape file that together have ``min_rows`` unique tokens."""
    rows = 0
    with gzip.open(folder / f"{name}.jsonl.gz", "rt") as lines:
        for number, line in enumerate(lines):
            group = json.loads(line)
            tree = RolloutTree.from_shape(group["parent"], group["length"], group["sample_node"])
            yield tree
            rows += tree.num_tokens
            if rows >= min_rows or number + 1 == max_groups:
                break


def shape_forest(folder: Path, name: str, min_rows: int = SHAPE_ROWS) -> Forest:
    """The first groups of a shape file, at most 100, that together have ``min_rows`` unique tokens."""
    return join(list(shape_trees(folder, name, min_rows, max_groups=100)))


def named_forest(folder: Path, name: str) -> Forest:
    """A layout of the registry, or the first groups of a shape file."""
    if name not in LAYOUTS:
        return shape_forest(folder, name)
    kind, length, fraction = LAYOUTS[name]
    return (nested_layout if kind == "nested" else prompt_layout)(length, fraction)


def draw_tokens(tree: RolloutTree, vocab: int, seed: int = 0) -> list[np.ndarray]:
    """Random trajectories of a tree's shape; siblings begin with different tokens."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(2, vocab, tree.num_tokens)
    order = np.argsort(tree.parent, kind="stable")
    above = tree.parent[order]
    first = np.flatnonzero(np.append(True, above[1:] != above[:-1]))
    nth = np.arange(len(order)) - np.repeat(first, np.diff(np.append(first, len(order))))
    eldest = np.repeat(order[first], np.diff(np.append(first, len(order))))
    tokens[order] = 2 + (tokens[eldest] - 2 + nth) % (vocab - 2)
    return [tokens[tree.path(index)] for index in range(tree.num_trajectories)]


def shape_window(folder: Path, name: str, min_rows: int, vocab: int) -> list[np.ndarray]:
    """Trajectories of the first groups of a shape file that together have ``min_rows`` unique tokens.

    The first token of a group is its number, so that groups share nothing.
    """
    found: list[np.ndarray] = []
    for number, tree in enumerate(shape_trees(folder, name, min_rows)):
        group = draw_tokens(tree, vocab, seed=number)
        for row in group:
            row[0] = 2 + number
        found += group
    return found


def spine(rows: int) -> RolloutTree:
    """A spine with a fork of 300 tokens every 1,000."""
    forks = max(1, rows // 1300)
    parent = [node for fork in range(forks) for node in (2 * fork - 2 if fork else -1, 2 * fork)]
    return RolloutTree.from_shape(parent, [1000, 300] * forks, list(range(1, 2 * forks, 2)))


def bush(rows: int) -> RolloutTree:
    """Full binary trees of five levels of 200 tokens each."""
    parent: list[int] = []
    for _ in range(max(1, rows // 6200)):
        first = len(parent)
        parent += [-1 if node == 0 else first + (node - 1) // 2 for node in range(31)]
    leaves = [node for node in range(len(parent)) if node not in set(parent)]
    return RolloutTree.from_shape(parent, [200] * len(parent), leaves)
