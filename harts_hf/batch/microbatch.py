"""A planned microbatch as tensors."""

from dataclasses import dataclass, field

import numpy as np
import torch

from harts_hf.batch.handoff import CONV_ANCESTORS, HandedKind, Imports, demands, exports, imports
from harts_hf.batch.tables import (
    AttentionIntervals,
    ConvTable,
    GatherIndex,
    LabelTable,
    LinearTables,
    RowTable,
    Tables,
    as_tensor,
)
from harts_hf.planner.chunks import CHUNK_SIZE, ChunkTree, build_chunk_tree
from harts_hf.planner.schedule import Microbatch, Schedule
from harts_hf.tree import IntArray, RolloutTree


@dataclass(frozen=True, eq=False, kw_only=True)
class TreeBatch(Tables):
    """One microbatch as tensors, immutable: what a run does with it is said by :class:`harts_hf.modeling.TreePass`.

    Attributes:
        id: of the microbatch.
        input_ids: ``[1, N]`` int64.
        position_ids: ``[1, N]`` int64, depth in the tree.
        occurrence_counts: ``[1, N]`` int64, trajectories through each row; 0 where another microbatch owns the row.
        labels: what log-probs and entropies are computed of here.
        owned: what values of rows themselves (a critic's) are computed of here.
        attention: intervals for full attention.
        linear: tables for linear attention.
        imports: by kind, where rows and states handed over by trunks come from.
        exports: by kind, own rows (``states``: chunk nodes) that dependents read, int64.
    """

    id: int
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    occurrence_counts: torch.Tensor
    labels: LabelTable
    owned: RowTable
    attention: AttentionIntervals
    linear: LinearTables
    imports: dict[HandedKind, Imports]
    exports: dict[HandedKind, torch.Tensor]
    _conv_source: IntArray
    _num_handed_conv: int
    _conv: dict[int, ConvTable] = field(default_factory=dict)  # tables made so far, by width

    @classmethod
    def build(
        cls,
        tree: RolloutTree,
        microbatch: Microbatch,
        *,
        chunk_size: int = CHUNK_SIZE,
        need: dict[HandedKind, IntArray] | None = None,
        imported: dict[HandedKind, Imports] | None = None,
        exported: dict[HandedKind, IntArray] | None = None,
    ) -> "TreeBatch":
        """A microbatch of a tree, on the CPU.

        Args:
            tree: that the microbatch's rows refer to.
            microbatch: planned.
            chunk_size: C.
            need: rows that it reads without computing them, by kind; found if None.
            imported: where it finds them; it reads nothing if None.
            exported: rows of the tree that others read of it; none if None.
        """
        rows = microbatch.rows
        need = demands(tree, microbatch, chunk_size) if need is None else need
        keys = np.concatenate([need["keys"], rows])
        linear, node_of_row = _linear_tables(tree, rows, need, chunk_size)
        owned = np.flatnonzero(microbatch.owned)
        return cls(
            id=microbatch.id,
            input_ids=as_tensor(tree.token_ids[rows])[None],
            position_ids=as_tensor(tree.depth[rows])[None],
            occurrence_counts=as_tensor(np.where(microbatch.owned, tree.occurrence_counts[rows], 0))[None],
            labels=_labels(tree, microbatch),
            owned=RowTable(rows=as_tensor(owned), tree_rows=as_tensor(rows[owned])),
            attention=AttentionIntervals(
                lo=as_tensor(np.searchsorted(rows, keys)).int(),
                hi=as_tensor(np.searchsorted(rows, tree.subtree_end[keys])).int(),
            ),
            linear=linear,
            imports=imported or {},
            exports={
                kind: as_tensor(node_of_row[wanted] if kind == "states" else np.searchsorted(rows, wanted))
                for kind, wanted in (exported or {}).items()
                if len(wanted)
            },
            _conv_source=_ancestor_table(tree, rows, need["conv"]),
            _num_handed_conv=len(need["conv"]),
        )

    @property
    def num_rows(self) -> int:
        """N."""
        return self.input_ids.shape[1]

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.input_ids.device

    def conv(self, width: int) -> ConvTable:
        """The ancestor table of a causal convolution of ``width`` taps.

        Raises:
            ValueError: more taps than the handed rows allow.
        """
        if width > CONV_ANCESTORS + 1:
            raise ValueError(f"expected a convolution of at most {CONV_ANCESTORS + 1} taps, got {width}")
        if width not in self._conv:
            index = self._conv_source[:, CONV_ANCESTORS + 1 - width :].ravel()
            num_rows = self.num_rows + self._num_handed_conv
            self._conv[width] = ConvTable(gather=GatherIndex.build(index, num_rows), width=width).to(self.device)
        return self._conv[width]


def build_batches(schedule: Schedule) -> list[TreeBatch]:
    """The microbatches of a schedule as tensors on the CPU, in order, with what they hand to one another.

    Raises:
        ValueError: a schedule whose trunks do not hold what their dependents need.
    """
    tree, microbatches, chunk_size = schedule.tree, schedule.microbatches, schedule.config.chunk_size
    needed = [demands(tree, microbatch, chunk_size) for microbatch in microbatches]
    exported = exports(needed, microbatches)
    return [
        TreeBatch.build(
            tree,
            microbatch,
            chunk_size=chunk_size,
            need=need,
            imported=imports(microbatch, need, exported),
            exported=exported[microbatch.id],
        )
        for microbatch, need in zip(microbatches, needed, strict=True)
    ]


def _linear_tables(
    tree: RolloutTree, rows: IntArray, need: dict[HandedKind, IntArray], chunk_size: int
) -> tuple[LinearTables, IntArray]:
    """The tables, and for each row of the tree the chunk node that ends there (-1 for none)."""
    together = np.sort(np.concatenate([need["linear"], rows]))  # disjoint, so preorder again
    position = np.full(tree.num_tokens + 1, -1, np.int64)
    position[together] = np.arange(len(together))
    chunks = build_chunk_tree(position[tree.parent[together]], tree.depth[together], chunk_size)
    entry_keys = np.where(chunks.entry_row >= 0, tree.parent[together[chunks.entry_row]], -1)
    if not np.array_equal(np.unique(entry_keys[chunks.entry_row >= 0]), need["states"]):
        raise ValueError(
            "expected rows closed under parent together with the prefix, got a row whose parent is missing"
        )
    node_of_row = np.full(tree.num_tokens, -1, np.int64)
    node_of_row[together[_last_rows(chunks)]] = np.arange(chunks.num_nodes)
    return LinearTables.build(chunks, position[rows], entry_keys), node_of_row


def _last_rows(chunks: ChunkTree) -> IntArray:
    return chunks.rows[np.arange(chunks.num_nodes), chunks.lengths - 1]


def _ancestor_table(tree: RolloutTree, rows: IntArray, handed: IntArray) -> IntArray:
    """``[N, CONV_ANCESTORS + 1]`` positions among handed and own rows of each row's last ancestors and itself."""
    position = np.full(tree.num_tokens + 1, -1, np.int64)
    position[handed] = np.arange(len(handed))
    position[rows] = len(handed) + np.arange(len(rows))
    parent = np.append(tree.parent, -1)
    columns = [rows]
    for _ in range(CONV_ANCESTORS):
        columns.append(parent[columns[-1]])
    return position[np.stack(columns[::-1], axis=1)]


def _labels(tree: RolloutTree, microbatch: Microbatch) -> LabelTable:
    """Labels of owned rows: the tokens directly below them, wherever those are computed."""
    owner = np.full(tree.num_tokens + 1, -1, np.int64)
    owned = np.flatnonzero(microbatch.owned)
    owner[microbatch.rows[owned]] = owned
    predictor = owner[tree.parent]
    tree_rows = np.flatnonzero(predictor >= 0)
    tree_rows = tree_rows[np.argsort(predictor[tree_rows], kind="stable")]
    return LabelTable(
        rows=as_tensor(predictor[tree_rows]),
        token_ids=as_tensor(tree.token_ids[tree_rows]),
        tree_rows=as_tensor(tree_rows),
    )
