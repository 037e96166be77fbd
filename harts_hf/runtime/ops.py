"""The ops that a rank runs of a window: the scoring pass, the planned ones, dummies where other ranks run more."""

from collections.abc import Sequence, Set
from typing import Literal, get_args

import numpy as np

from harts_hf.planner import Schedule
from harts_hf.planner.config import Execution
from harts_hf.planner.execution import OP_KINDS, Op, OpKind, align
from harts_hf.runtime.ranks import Ranks
from harts_hf.runtime.window import TreeWindow

Mode = Literal["train", "score", "unscored"]


def ops_of(window: TreeWindow, mode: Mode, ranks: Ranks) -> tuple[list[Op], int]:
    """The ops of a run, by the numbers of ``window.batches``, and how many of them are the scoring pass.

    In "train" the first forward of each microbatch comes first and scores it; in "unscored" no forward is for scores
    alone, and only trunks whose states are needed first have one without a graph. All ranks run equal strings of
    kinds; those of the others are known from a plan for all, and are asked for where each rank plans its own.

    Raises:
        ValueError: another mode, or a plan for other processes than these.
    """
    _check_ranks(window, ranks)
    if mode not in get_args(Mode):
        raise ValueError(f"expected mode to be one of {', '.join(get_args(Mode))}, got {mode!r}")
    schedule = window.schedule
    if window.is_of_all_ranks:
        parts = [[m.id for m in schedule.microbatches if m.rank == rank] for rank in range(ranks.count)]
        most = max(map(len, parts))
        trunks = _trunks(schedule)
        words = [
            _word(ids, schedule.ops(rank, dummies=False), schedule.execution, mode, most, trunks)
            for rank, ids in enumerate(parts)
        ]
        own, part = range(len(window.batches)), window.part
        words[ranks.index] = _word(own, part.ops(dummies=False), schedule.execution, mode, most, _trunks(part))
    else:
        own = range(len(window.batches))
        (most,) = ranks.agree(len(own))
        word = _word(own, schedule.ops(dummies=False), schedule.execution, mode, most, _trunks(schedule))
        kinds = np.array([OP_KINDS.index(kind) for kind, _ in word], np.int64)
        words = [[(OP_KINDS[code], 0) for code in codes.tolist()] for (codes,) in ranks.gather_arrays([kinds])]
        words[ranks.index] = word
    return align(words)[ranks.index], 0 if mode == "unscored" else most


def _trunks(schedule: Schedule) -> set[int]:
    return {trunk for microbatch in schedule.microbatches for trunk in microbatch.trunks}


def _word(
    ids: Sequence[int], planned: Sequence[Op], execution: Execution, mode: Mode, most: int, trunks: Set[int]
) -> list[Op]:
    """The ops of one rank without dummies.

    Args:
        ids: its microbatches.
        planned: its planned ops.
        execution: of the schedule.
        mode: of the run.
        most: microbatches of the rank that has most.
        trunks: microbatches that others read states of.
    """
    scoring: list[Op] = [("S", index) for index in ids]
    if mode == "score":
        return scoring
    if most == 1:  # one graph is alive in any case, so scoring apart would only cost a forward
        kinds: tuple[OpKind, ...] = ("F", "B")
        return [(kind, index) for kind in kinds for index in ids]
    if mode == "unscored":
        return [(kind, index) for kind, index in planned if kind != "S" or index in trunks]
    return [*scoring, *planned] if execution == "nested" else list(planned)


def _check_ranks(window: TreeWindow, ranks: Ranks) -> None:
    """A plan for several ranks has microbatches that no other processes would run: gradients would lack them."""
    planned = window.schedule.config.world_size
    if window.is_of_all_ranks and (planned, window.rank) != (ranks.count, ranks.index):
        raise ValueError(
            f"expected a plan for {ranks.count} processes on process {ranks.index}, got rank {window.rank} of a plan "
            f"for world_size={planned}"
        )
