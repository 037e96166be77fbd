"""Which boundary rows and states microbatches of a schedule hand to one another (docs/windows.md).

A dependent reads, per layer: keys and values (or latents) of its whole prefix; the recurrent state at the last chunk
end above each of its roots; the post-convolution rows of the (at most C - 1) tokens between that chunk end and the
root; and the pre-convolution rows of the root's last ancestors. Each comes from whichever trunk computed the row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from harts_hf.batch.tables import Tables, as_tensor
from harts_hf.planner.accounting import spans_by_trunk
from harts_hf.planner.microbatch import Microbatch
from harts_hf.planner.spans import contains, expand_ranges
from harts_hf.tree import IntArray, RolloutTree

HandedKind = Literal["keys", "linear", "conv", "states"]
HANDED_KINDS: tuple[HandedKind, ...] = ("keys", "linear", "conv", "states")
# Pre-convolution rows that are handed over: a convolution of up to CONV_ANCESTORS + 1 taps.
CONV_ANCESTORS = 3


@dataclass(frozen=True, eq=False, kw_only=True)
class Imports(Tables):
    """Where the handed rows of one kind come from.

    Attributes:
        trunks: ids of the microbatches that are read.
        indices: for each of them, indices into what it exports of this kind.
        order: ``[E]`` brings the pieces, one after the other, into ascending order of tree rows; None if they are.
    """

    trunks: tuple[int, ...]
    indices: tuple[torch.Tensor, ...]
    order: torch.Tensor | None


def demands(tree: RolloutTree, microbatch: Microbatch, chunk_size: int) -> dict[HandedKind, IntArray]:
    """Rows of the tree, ascending, that a microbatch needs of each kind without computing them.

    ``states`` are named by the row whose chunk they stand after.
    """
    nothing = np.zeros(0, np.int64)
    if not len(microbatch.prefix):
        return dict.fromkeys(HANDED_KINDS, nothing)
    above = tree.parent[microbatch.rows]
    above = np.unique(above[(above >= 0) & ~contains(microbatch.row_spans, above)])
    within = (tree.depth[above] + 1) % chunk_size  # rows to replay above each root
    replayed = _ancestors(tree, above, within)
    chunk_ends = np.unique(_step_up(tree, above, within))
    return {
        "keys": microbatch.prefix,
        "linear": replayed,
        "conv": _ancestors(tree, above, np.full(len(above), CONV_ANCESTORS)),
        "states": chunk_ends[chunk_ends >= 0],
    }


def exports(
    needed: Sequence[dict[HandedKind, IntArray]], microbatches: Sequence[Microbatch]
) -> list[dict[HandedKind, IntArray]]:
    """Rows of the tree, ascending, that each microbatch has to hand over, by kind.

    Complexity: NumPy work over the rows that are needed, and a few calls per microbatch.
    """
    first = np.cumsum([0] + [microbatch.num_rows for microbatch in microbatches])
    # The rows of all microbatches, one after another; row r of microbatch m has the number m * stride + r.
    stride = max(int(microbatch.row_spans[-1, 1]) for microbatch in microbatches)
    numbers = np.concatenate([microbatch.rows + stride * index for index, microbatch in enumerate(microbatches)])
    wanted = {kind: np.zeros(len(numbers), bool) for kind in HANDED_KINDS}
    for microbatch, need in zip(microbatches, needed, strict=True):
        if not microbatch.trunks:
            continue
        trunk, spans = spans_by_trunk(microbatch, microbatches)
        at = np.searchsorted(numbers, trunk * stride + spans[:, 0])
        for kind in HANDED_KINDS:
            low, high = np.searchsorted(need[kind], spans[:, 0]), np.searchsorted(need[kind], spans[:, 1])
            span, index = expand_ranges(low, high)
            wanted[kind][at[span] + need[kind][index] - spans[span, 0]] = True
    return [
        {kind: microbatch.rows[wanted[kind][start:stop]] for kind in HANDED_KINDS}
        for microbatch, start, stop in zip(microbatches, first[:-1].tolist(), first[1:].tolist(), strict=True)
    ]


def imports(
    microbatch: Microbatch, need: dict[HandedKind, IntArray], exported: Sequence[dict[HandedKind, IntArray]]
) -> dict[HandedKind, Imports]:
    """Where a microbatch finds the rows it needs.

    Raises:
        ValueError: a row that none of its trunks, or more than one, computes: a schedule that is not valid.
    """
    found: dict[HandedKind, Imports] = {}
    for kind in HANDED_KINDS:
        offered = [exported[trunk][kind] for trunk in microbatch.trunks]
        owner, index = expand_ranges(np.zeros(len(offered), np.int64), np.array(list(map(len, offered)), np.int64))
        rows = np.concatenate([np.zeros(0, np.int64), *offered])
        taken = contains(np.stack([need[kind], need[kind] + 1], axis=1), rows)
        owner, index, rows = owner[taken], index[taken], rows[taken]
        order = np.argsort(rows, kind="stable")
        if not np.array_equal(rows[order], need[kind]):
            raise ValueError(
                f"expected the trunks {microbatch.trunks} of microbatch {microbatch.id} to hand over each of its "
                f"{len(need[kind])} {kind} once, got {len(rows)} of them"
            )
        if not len(rows):
            continue
        readers, starts = np.unique(owner, return_index=True)
        found[kind] = Imports(
            trunks=tuple(microbatch.trunks[reader] for reader in readers.tolist()),
            indices=tuple(as_tensor(part) for part in np.split(index, starts[1:])),
            order=None if (np.diff(order) == 1).all() else as_tensor(order),
        )
    return found


def _ancestors(tree: RolloutTree, rows: IntArray, counts: IntArray) -> IntArray:
    """The first ``counts`` rows of each path upwards from ``rows``, each row once, ascending."""
    found = [np.zeros(0, np.int64)]
    counts = counts.copy()
    while len(rows):
        rows, counts = rows[counts > 0], counts[counts > 0]
        found.append(rows)
        above = tree.parent[rows]
        rows, counts = above[above >= 0], counts[above >= 0] - 1
    return np.unique(np.concatenate(found))


def _step_up(tree: RolloutTree, rows: IntArray, steps: IntArray) -> IntArray:
    """The row ``steps`` above each row, -1 above a root."""
    rows, steps = rows.copy(), steps.copy()
    while (moving := (steps > 0) & (rows >= 0)).any():
        rows[moving] = tree.parent[rows[moving]]
        steps = steps - 1
    return rows
