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
from harts_hf.planner.chunks import CHUNK_SIZE, build_chunk_tree
from harts_hf.planner.schedule import Microbatch, Schedule
from harts_hf.planner.spans import (
    count_below,
    expand_ranges,
    merge_spans,
    places_in,
    rows_of_spans,
    sorted_unique,
    spans_of_rows,
)
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
    _conv_parent: IntArray  # [E + N] the row before each, of handed and own ones; -1 for none among them
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
        rows, spans = microbatch.rows, microbatch.row_spans
        need = demands(tree, microbatch, chunk_size) if need is None else need
        keys = np.concatenate([need["keys"], rows]) if len(need["keys"]) else rows
        above = places_in(spans, tree.parent[rows])
        linear, last_rows = _linear_tables(tree, microbatch, need, above, chunk_size)
        owned = np.flatnonzero(microbatch.owned)
        return cls(
            id=microbatch.id,
            input_ids=as_tensor(tree.token_ids[rows])[None],
            position_ids=as_tensor(tree.depth[rows])[None],
            occurrence_counts=as_tensor(np.where(microbatch.owned, tree.occurrence_counts[rows], 0))[None],
            labels=_labels(tree, microbatch, owned),
            owned=RowTable(rows=as_tensor(owned), tree_rows=as_tensor(rows[owned])),
            attention=AttentionIntervals(
                lo=as_tensor(np.append(count_below(spans, need["keys"]), np.arange(len(rows))).astype(np.int32)),
                hi=as_tensor(count_below(spans, tree.subtree_end[keys]).astype(np.int32)),
            ),
            linear=linear,
            imports=imported or {},
            exports={
                kind: as_tensor(np.searchsorted(last_rows, wanted) if kind == "states" else count_below(spans, wanted))
                for kind, wanted in (exported or {}).items()
                if len(wanted)
            },
            _conv_parent=_conv_parents(tree, microbatch, need["conv"], above),
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
            handed, above = self._num_handed_conv, np.append(self._conv_parent, -1)  # -1 reads the last entry, -1
            ancestors = np.empty((self.num_rows, width), np.int64)
            ancestors[:, -1] = np.arange(handed, handed + self.num_rows)
            for column in range(width - 2, -1, -1):
                ancestors[:, column] = above[ancestors[:, column + 1]]
            gather = GatherIndex.build(ancestors.ravel(), handed + self.num_rows)
            self._conv[width] = ConvTable(gather=gather, width=width).to(self.device)
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
    tree: RolloutTree, microbatch: Microbatch, need: dict[HandedKind, IntArray], above: IntArray, chunk_size: int
) -> tuple[LinearTables, IntArray]:
    """The tables, and the row of the tree in which each of their nodes ends, ascending.

    Args:
        tree: of the microbatch.
        microbatch: planned.
        need: what it reads.
        above: ``[N]`` place of each own row's parent among own rows, -1 for none.
        chunk_size: C.
    """
    rows, handed = microbatch.rows, need["linear"]
    together, parent, own = rows, above, np.arange(len(rows))
    if len(handed):
        spans = merge_spans(np.concatenate([microbatch.row_spans, spans_of_rows(handed)]))  # disjoint
        together = rows_of_spans(spans)  # preorder again
        parent, own = places_in(spans, tree.parent[together]), places_in(spans, rows)
    chunks = build_chunk_tree(parent, tree.depth[together], chunk_size)
    is_entry = chunks.entry_row >= 0
    entry_keys = np.where(is_entry, tree.parent[together[chunks.entry_row]], -1)
    if not np.array_equal(sorted_unique(entry_keys[is_entry]), need["states"]):
        raise ValueError(
            "expected rows closed under parent together with the prefix, got a row whose parent is missing"
        )
    last_rows = together[chunks.rows[np.arange(chunks.num_nodes), chunks.lengths - 1]]
    return LinearTables.build(chunks, own, entry_keys), last_rows


def _conv_parents(tree: RolloutTree, microbatch: Microbatch, handed: IntArray, above: IntArray) -> IntArray:
    """``[E + N]`` place among handed and own rows of the row before each, -1 for none."""
    if len(handed) == 0:
        return above
    rows = tree.parent[np.concatenate([handed, microbatch.rows])]
    found = np.minimum(np.searchsorted(handed, rows), len(handed) - 1)
    own = places_in(microbatch.row_spans, rows)
    return np.where(own >= 0, own + len(handed), np.where(handed[found] == rows, found, -1))


def _labels(tree: RolloutTree, microbatch: Microbatch, owned: IntArray) -> LabelTable:
    """Labels of owned rows (``owned``, their numbers): the tokens directly below them, wherever those are computed."""
    spans = microbatch.owned_spans
    _, positions = expand_ranges(tree.child_ptr[spans[:, 0]], tree.child_ptr[spans[:, 1]])
    tree_rows = tree.children[positions]
    return LabelTable(
        rows=as_tensor(np.repeat(owned, tree.num_children[microbatch.rows[owned]])),
        token_ids=as_tensor(tree.token_ids[tree_rows]),
        tree_rows=as_tensor(tree_rows),
    )
