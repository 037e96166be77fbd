"""Which boundary rows and states microbatches of a schedule hand to one another (DESIGN 5).

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
from harts_hf.planner.schedule import Microbatch
from harts_hf.tree import IntArray, RolloutTree

Kind = Literal["keys", "linear", "conv", "states"]
KINDS: tuple[Kind, ...] = ("keys", "linear", "conv", "states")
# Pre-convolution rows that are handed over: a convolution of up to CONV_ANCESTORS + 1 taps.
CONV_ANCESTORS = 3


@dataclass(frozen=True, eq=False, kw_only=True)
class Imports(Tables):
    """Where the handed rows of one kind come from.

    Attributes:
        trunks: ids of the microbatches that are read.
        indices: for each of them, places among what it exports of this kind.
        order: ``[E]`` brings the pieces, one after the other, into ascending order of tree rows; None if they are.
    """

    trunks: tuple[int, ...]
    indices: tuple[torch.Tensor, ...]
    order: torch.Tensor | None


def demands(tree: RolloutTree, microbatch: Microbatch, chunk_size: int) -> dict[Kind, IntArray]:
    """Rows of the tree, ascending, that a microbatch needs of each kind without computing them.

    ``states`` are named by the row whose chunk they stand after.
    """
    nothing = np.zeros(0, np.int64)
    if not len(microbatch.prefix):
        return dict.fromkeys(KINDS, nothing)
    is_own = np.zeros(tree.num_tokens + 1, bool)
    is_own[microbatch.rows] = True
    above = tree.parent[microbatch.rows]
    above = np.unique(above[(above >= 0) & ~is_own[above]])
    within = (tree.depth[above] + 1) % chunk_size  # rows to replay above each root
    replayed = _ancestors(tree, above, within)
    chunk_ends = np.unique(_step_up(tree, above, within))
    return {
        "keys": microbatch.prefix,
        "linear": replayed,
        "conv": _ancestors(tree, above, np.full(len(above), CONV_ANCESTORS)),
        "states": chunk_ends[chunk_ends >= 0],
    }


def exports(needed: Sequence[dict[Kind, IntArray]], microbatches: Sequence[Microbatch]) -> list[dict[Kind, IntArray]]:
    """Rows of the tree, ascending, that each microbatch has to hand over, by kind."""
    wanted: list[dict[Kind, list[IntArray]]] = [{kind: [] for kind in KINDS} for _ in microbatches]
    for microbatch, need in zip(microbatches, needed, strict=True):
        for trunk in microbatch.trunks:
            for kind in KINDS:
                wanted[trunk][kind].append(_shared(need[kind], microbatches[trunk].rows))
    return [
        {kind: np.unique(np.concatenate(pieces)) if pieces else np.zeros(0, np.int64) for kind, pieces in one.items()}
        for one in wanted
    ]


def imports(
    microbatch: Microbatch, need: dict[Kind, IntArray], exported: Sequence[dict[Kind, IntArray]]
) -> dict[Kind, Imports]:
    """Where a microbatch finds the rows it needs.

    Raises:
        ValueError: a row that none of its trunks, or more than one, computes: a schedule that is not valid.
    """
    found: dict[Kind, Imports] = {}
    for kind in KINDS:
        pieces = [(trunk, _shared(need[kind], exported[trunk][kind])) for trunk in microbatch.trunks]
        pieces = [(trunk, rows) for trunk, rows in pieces if len(rows)]
        together = np.concatenate([rows for _, rows in pieces]) if pieces else np.zeros(0, np.int64)
        order = np.argsort(together, kind="stable")
        if not np.array_equal(together[order], need[kind]):
            raise ValueError(
                f"expected the trunks {microbatch.trunks} of microbatch {microbatch.id} to hand over each of its "
                f"{len(need[kind])} {kind} once, got {len(together)} of them"
            )
        if not pieces:
            continue
        found[kind] = Imports(
            trunks=tuple(trunk for trunk, _ in pieces),
            indices=tuple(as_tensor(np.searchsorted(exported[trunk][kind], rows)) for trunk, rows in pieces),
            order=None if (np.diff(order) == 1).all() else as_tensor(order),
        )
    return found


def _shared(rows: IntArray, others: IntArray) -> IntArray:
    return np.intersect1d(rows, others, assume_unique=True)


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
    parent = np.append(tree.parent, -1)
    while (steps > 0).any():
        rows = np.where(steps > 0, parent[rows], rows)
        steps = steps - 1
    return rows
