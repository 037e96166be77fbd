"""The ops that a rank runs of a window: the scoring pass, the planned ones, dummies where other ranks run more."""

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from harts_hf.planner import Schedule
from harts_hf.planner.execution import OP_KINDS, Op, OpKind, align
from harts_hf.runtime.ranks import Ranks
from harts_hf.runtime.window import TreeWindow

Mode = Literal["train", "score", "unscored"]


def ops_of(window: TreeWindow, mode: Mode, ranks: Ranks) -> tuple[list[Op], int]:
    """The ops of a run, by the numbers of ``window.batches``, and how many of them are the scoring pass.

    In "train" the first forward of each microbatch comes first and scores it. All ranks run equal strings of kinds;
    those of the others are known from a plan for all, and are asked for where each rank plans its own.

    Raises:
        ValueError: a mode that the plan's execution does not have, or a plan for other processes than these.
    """
    _check_ranks(window, ranks)
    if mode not in get_args(Mode):
        raise ValueError(f"expected mode to be one of {', '.join(get_args(Mode))}, got {mode!r}")
    schedule = window.schedule
    if window.is_of_all_ranks:
        parts = [[m.id for m in schedule.microbatches if m.rank == rank] for rank in range(ranks.count)]
        most = max(map(len, parts))
        words = [_word(ids, schedule.ops(rank, dummies=False), schedule, mode, most) for rank, ids in enumerate(parts)]
        words[ranks.index] = _word(range(len(window.batches)), window.part.ops(dummies=False), schedule, mode, most)
    else:
        own = len(window.batches)
        (most,) = ranks.agree(own)
        word = _word(range(own), schedule.ops(dummies=False), schedule, mode, most)
        kinds = np.array([OP_KINDS.index(kind) for kind, _ in word], np.int64)
        words = [[(OP_KINDS[code], 0) for code in codes.tolist()] for (codes,) in ranks.gather_arrays([kinds])]
        words[ranks.index] = word
    return align(words)[ranks.index], 0 if mode == "unscored" else most


def _word(ids: Sequence[int], planned: Sequence[Op], schedule: Schedule, mode: Mode, most: int) -> list[Op]:
    """The ops of one rank without dummies.

    Args:
        ids: its microbatches.
        planned: its planned ops.
        schedule: of the window.
        mode: of the run.
        most: microbatches of the rank that has most.
    """
    scoring: list[Op] = [("S", index) for index in ids]
    if mode == "score":
        return scoring
    if most == 1:  # one graph is alive in any case, so scoring apart would only cost a forward
        kinds: tuple[OpKind, ...] = ("F", "B")
        return [(kind, index) for kind in kinds for index in ids]
    if mode == "unscored" and schedule.execution != "nested":
        raise ValueError(f"expected the nested execution without a scoring pass, got {schedule.execution}")
    return [*scoring, *planned] if mode == "train" and schedule.execution == "nested" else list(planned)


def _check_ranks(window: TreeWindow, ranks: Ranks) -> None:
    """A plan for several ranks has microbatches that no other processes would run: gradients would lack them."""
    planned = window.schedule.config.world_size
    if window.is_of_all_ranks and (planned, window.rank) != (ranks.count, ranks.index):
        raise ValueError(
            f"expected a plan for {ranks.count} processes on process {ranks.index}, got rank {window.rank} of a plan "
            f"for world_size={planned}"
        )
